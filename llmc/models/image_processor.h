/*
From images to what a vision tower reads: rows of pixel values, one for each patch, as transformers'
Qwen2VLImageProcessor makes them with Pillow (its PIL backend), for Qwen2-VL, Qwen3-VL and Qwen3.6. To the last bit.
    ImageProcessor            sizes and bounds, from preprocessor_config.json and back into one
    image_processor_resized   the size that an image gets; image_processor_resized_video, that of a video's frames
    image_processor_patches   of an image in memory, or of the frames of a video: Patches, with their grid; of a file
                              image_patches.h has them
    image_processor_tokens    so many placeholders stand for a grid in the text
An image (height, width) becomes (h, w), whole squares of side S = patch * merge, near its own aspect ratio, with a
number of pixels between the bounds:
    h = S * round(height / S), w alike; halves go to the even number
    above max_pixels: h = max(S, S * floor(height / b / S)) with b = sqrt(height * width / max_pixels)
    below min_pixels: h = S * ceil(height * b / S) with b = sqrt(min_pixels / (height * width))
Then image_resize, bicubic, and value = (byte * (1 / 255) - mean) / std: the product in double, rounded to float; the
difference and the quotient as floats.
A row is a patch of `temporal` frames; a single image is as many frames that are alike. The rows of a video have the
grid (t, h / patch, w / patch), t = frames / temporal, where the last frame is repeated to fill up. Order
    of rows      as patch_order.h says
    of columns   channel, frame, y, x: 3 * temporal * patch * patch numbers
Of a video the bounds hold for the pixels of all frames, counted in whole numbers of `temporal` frames; frames smaller
than a square are first made as large.
preprocessor_config.json (video: video_preprocessor_config.json; both may be parts of processor_config.json) has
patch_size, temporal_patch_size, merge_size, image_mean, image_std, rescale_factor, and the bounds: "size" with
"shortest_edge" and "longest_edge", which are numbers of pixels, or "min_pixels" and "max_pixels", there or at top
level, which win. A key that is absent has the value of transformers' class. What another class would compute (no
resizing, another filter, ...) is refused.
Errors: 0 with the reason; fail_input of image_processor_load with file and reason.
Source: huggingface/transformers 5.24, models/qwen2_vl/image_processing_pil_qwen2_vl.py,
        models/qwen3_vl/video_processing_qwen3_vl.py; explained in doc/images.md
*/
#ifndef LLMC_IMAGE_PROCESSOR_H
#define LLMC_IMAGE_PROCESSOR_H
#include "../core/jsonfile.h"     // json_read, json_ints, json_number, json_agrees
#include "../files/pixels.h"      // Image
#include "../ops/image_resize.h"  // image_resize
#include "../ops/patch_order.h"   // patch_place
#include "config_parts.h"         // config_is_absent

enum { PROCESSOR_MOST_PIXELS = 1 << 28, PROCESSOR_MOST_ASPECT = 200 };

typedef struct {
    int is_video;         // the bounds hold for all frames together
    int patch;            // pixels of a patch's side, 16
    int temporal;         // frames of a patch, 2
    int merge;            // patches of the side of a token's square, 2
    int min_pixels;       // of an image that was resized, 65536
    int max_pixels;       // 16777216
    double mean[3];       // of each channel, 0.5
    double std[3];        // 0.5
    double rescale;       // 1 / 255
} ImageProcessor;

typedef struct {
    int t, h, w;          // patches: in time, of a column, of a row
} PatchGrid;

typedef struct {
    float* values;        // (t * h * w, columns), on the heap
    PatchGrid grid;
    size_t rows, columns;
    size_t n_decoded;     // pixels of the file that they were made of (image_patches.h)
} Patches;

// what transformers' class has where a file does not say
static inline ImageProcessor image_processor_default(int is_video) {
    const ImageProcessor of_images = {0, 14, 2, 2, 56 * 56, 28 * 28 * 1280, {0.48145466, 0.4578275, 0.40821073},
                                      {0.26862954, 0.26130258, 0.27577711}, 1.0 / 255.0};
    const ImageProcessor of_videos = {1, 16, 2, 2, 128 * 32 * 32, 768 * 32 * 32, {0.5, 0.5, 0.5}, {0.5, 0.5, 0.5},
                                      1.0 / 255.0};
    return is_video ? of_videos : of_images;
}

// what Qwen3.6 is published with
static inline ImageProcessor image_processor_qwen36(int is_video) {
    ImageProcessor p = image_processor_default(1);
    p.is_video = is_video;
    p.min_pixels = is_video ? 4096 : 65536;
    p.max_pixels = is_video ? 25165824 : 16777216;
    return p;
}

// ---- preprocessor_config.json ----

// an integer within 1..high; an absent key or null leaves *value as it is
static inline int image_processor_int_(int* value, const json_t* json, const char* key, int high, ErrorText* error) {
    const JsonInt one[] = {{key, value, 1, high}};
    return config_is_absent(json, key) || json_ints(json, one, 1, error);
}

// three numbers, or one for all three
static inline int image_processor_channels_(double out[3], const json_t* json, const char* key, double low,
                                            ErrorText* error) {
    const json_t* list = json_object_get(json, key);
    char expected[64];
    if (config_is_absent(json, key)) { return 1; }
    for (size_t c = 0; c < 3; c++) {
        const json_t* x = json_is_array(list) ? json_array_get(list, c) : list;
        const double value = json_number_value(x);
        const int is_three = !json_is_array(list) || json_array_size(list) == 3;
        if (!json_is_number(x) || !(value >= low && value <= 1e3) || !is_three) {
            snprintf(expected, sizeof expected, "a number %g..1000 for each of three channels", low);
            return json_refuse_value(error, key, expected, list);
        }
        out[c] = value;
    }
    return 1;
}

// the older names win, as in transformers
static inline int image_processor_bounds_(ImageProcessor* p, const json_t* json, ErrorText* error) {
    const json_t* size = json_object_get(json, "size");
    if (!config_is_absent(json, "size") && !json_is_object(size)) {
        return json_refuse_value(error, "size", "an object with shortest_edge and longest_edge", size);
    }
    const json_t* places[] = {size, json};
    const int most = PROCESSOR_MOST_PIXELS;
    if (!image_processor_int_(&p->min_pixels, size, "shortest_edge", most, error) ||
        !image_processor_int_(&p->max_pixels, size, "longest_edge", most, error)) {
        return 0;
    }
    for (int i = 0; i < 2; i++) {
        if (!image_processor_int_(&p->min_pixels, places[i], "min_pixels", most, error) ||
            !image_processor_int_(&p->max_pixels, places[i], "max_pixels", most, error)) {
            return 0;
        }
    }
    return p->min_pixels <= p->max_pixels ||
           error_set(error, "\"longest_edge\" or \"max_pixels\" %d: expected at least \"shortest_edge\" or "
                     "\"min_pixels\", %d", p->max_pixels, p->min_pixels);
}

// one of three names or none; Fast and Pil are the same processor on other libraries
static inline int image_processor_kind_(const json_t* json, int is_video, ErrorText* error) {
    int kind = 0;
    if (is_video) { return json_choice(&kind, json, "video_processor_type", "Qwen3VLVideoProcessor", error); }
    return json_choice(&kind, json, "image_processor_type",
                       "Qwen2VLImageProcessor|Qwen2VLImageProcessorFast|Qwen2VLImageProcessorPil", error);
}

static inline int image_processor_parse(ImageProcessor* p, const json_t* json, int is_video, ErrorText* error) {
    *p = image_processor_default(is_video);
    return image_processor_kind_(json, is_video, error) &&
           image_processor_int_(&p->patch, json, "patch_size", 256, error) &&
           image_processor_int_(&p->temporal, json, "temporal_patch_size", 64, error) &&
           image_processor_int_(&p->merge, json, "merge_size", 64, error) &&
           image_processor_channels_(p->mean, json, "image_mean", -1e3, error) &&
           image_processor_channels_(p->std, json, "image_std", 1e-3, error) &&
           json_number(&p->rescale, json, "rescale_factor", 1e-6, 1e3, error) &&
           image_processor_bounds_(p, json, error) &&
           json_agrees(json, json_pack("{s:b, s:b, s:b, s:b, s:i}", "do_resize", 1, "do_rescale", 1, "do_normalize", 1,
                                       "do_convert_rgb", 1, "resample", 3), error);
}

// path: a preprocessor_config.json, or a processor_config.json, which has it under a name of its own
static inline ImageProcessor image_processor_load(const char* path, int is_video) {
    ImageProcessor p;
    ErrorText error;
    json_t* json = json_read(path);
    const json_t* part = json_object_get(json, is_video ? "video_processor" : "image_processor");
    if (!image_processor_parse(&p, json_is_object(part) ? part : json, is_video, &error)) {
        fail_input("%s: %s", path, error.text);
    }
    json_decref(json);
    return p;
}

static inline json_t* image_processor_json(const ImageProcessor* p) {
    json_t* json = json_pack("{s:s, s:b, s:b, s:b, s:b, s:i, s:f, s:[f,f,f], s:[f,f,f], s:{s:i, s:i}, s:i, s:i, s:i}",
                             p->is_video ? "video_processor_type" : "image_processor_type",
                             p->is_video ? "Qwen3VLVideoProcessor" : "Qwen2VLImageProcessor", "do_convert_rgb", 1,
                             "do_resize", 1, "do_rescale", 1, "do_normalize", 1, "resample", 3, "rescale_factor",
                             p->rescale, "image_mean", p->mean[0], p->mean[1], p->mean[2], "image_std", p->std[0],
                             p->std[1], p->std[2], "size", "shortest_edge", p->min_pixels, "longest_edge",
                             p->max_pixels, "patch_size", p->patch, "temporal_patch_size", p->temporal, "merge_size",
                             p->merge);
    return json;
}

// ---- the size that an image gets ----

static inline int image_processor_check_(int height, int width, ErrorText* error) {
    const int longer = height > width ? height : width, shorter = height > width ? width : height;
    if (shorter < 1) {
        return error_set(error, "expected an image of at least one pixel, found width %d, height %d", width, height);
    }
    return (int64_t)longer <= (int64_t)PROCESSOR_MOST_ASPECT * shorter ||
           error_set(error, "expected an image at most %d times as long as wide, found width %d, height %d: cut it",
                     PROCESSOR_MOST_ASPECT, width, height);
}

// height and width to whole squares; `counted` frames for what is rounded, `frames` for what is not
static inline int image_processor_fit_(int* h, int* w, const ImageProcessor* p, int height, int width, double frames,
                                       double counted, ErrorText* error) {
    const double square = p->patch * p->merge, most = p->max_pixels, least = p->min_pixels;
    const double n_pixels = frames * height * width;
    if (!image_processor_check_(height, width, error)) { return 0; }
    double rows = rint(height / square) * square, columns = rint(width / square) * square;  // rint: halves to even
    if (counted * rows * columns > most) {
        const double by = sqrt(n_pixels / most);
        rows = fmax(square, floor(height / by / square) * square);
        columns = fmax(square, floor(width / by / square) * square);
    } else if (counted * rows * columns < least) {
        const double by = sqrt(least / n_pixels);
        rows = ceil(height * by / square) * square;
        columns = ceil(width * by / square) * square;
    }
    if (rows * columns > (double)PROCESSOR_MOST_PIXELS) {
        return error_set(error, "expected at most %d pixels behind resizing, found %.0f", PROCESSOR_MOST_PIXELS,
                         rows * columns);
    }
    *h = (int)rows;
    *w = (int)columns;
    return 1;
}

static inline int image_processor_resized(int* h, int* w, const ImageProcessor* p, int height, int width,
                                          ErrorText* error) {
    return image_processor_fit_(h, w, p, height, width, 1.0, 1.0, error);
}

static inline int image_processor_resized_video(int* h, int* w, const ImageProcessor* p, int frames, int height,
                                                int width, ErrorText* error) {
    const int square = p->patch * p->merge;
    if (frames < p->temporal) {
        return error_set(error, "expected a video of at least %d frames, found %d: a single one is an image",
                         p->temporal, frames);
    }
    if (!image_processor_check_(height, width, error)) { return 0; }
    if (height < square || width < square) {
        const double by = fmax((double)square / height, (double)square / width);
        height = (int)(height * by);
        width = (int)(width * by);
    }
    const double counted = rint((double)frames / p->temporal) * p->temporal;
    return image_processor_fit_(h, w, p, height, width, frames, counted, error);
}

static inline PatchGrid image_processor_grid(const ImageProcessor* p, int frames, int h, int w) {
    const PatchGrid grid = {(frames + p->temporal - 1) / p->temporal, h / p->patch, w / p->patch};
    return grid;
}

static inline size_t image_processor_tokens(const ImageProcessor* p, PatchGrid grid) {
    return (size_t)grid.t * grid.h * grid.w / ((size_t)p->merge * p->merge);
}

// ---- pixel values ----

// of each channel and byte
typedef struct { float value[3][256]; } PixelValues_;

static inline PixelValues_ image_processor_values_(const ImageProcessor* p) {
    PixelValues_ v;
    for (int c = 0; c < 3; c++) {
        const float mean = (float)p->mean[c], std = (float)p->std[c];
        for (int byte = 0; byte < 256; byte++) {
            v.value[c][byte] = ((float)(byte * p->rescale) - mean) / std;
        }
    }
    return v;
}

// one patch of one frame into its row: out is that of channel 0; the pixel at its corner, rows of w pixels
static inline void image_processor_patch_(float* out, const ImageProcessor* p, const PixelValues_* v,
                                          const unsigned char* corner, int w) {
    const size_t channel = (size_t)p->temporal * p->patch * p->patch;
    for (int y = 0; y < p->patch; y++) {
        for (int x = 0; x < p->patch; x++) {
            const unsigned char* pixel = corner + 3 * ((size_t)y * w + x);
            for (int c = 0; c < 3; c++) { out[c * channel + y * p->patch + x] = v->value[c][pixel[c]]; }
        }
    }
}

// the frame `frame` of (h, w) into all rows of its time; copies: frames of that time that are like it
static inline void image_processor_frame_(Patches* patches, const ImageProcessor* p, const PixelValues_* v,
                                          const unsigned char* rgb, int frame, int copies) {
    const PatchGrid g = patches->grid;
    const int w = g.w * p->patch, n = g.h * g.w;
    const size_t area = (size_t)p->patch * p->patch;
    #pragma omp parallel for
    for (int i = 0; i < n; i++) {
        int r, c;
        patch_place(&r, &c, i, g.w, p->merge);
        const size_t row = (size_t)(frame / p->temporal) * n + i;
        const unsigned char* corner = rgb + 3 * ((size_t)r * p->patch * w + (size_t)c * p->patch);
        for (int k = 0; k < copies; k++) {
            float* out = patches->values + row * patches->columns + (frame % p->temporal + k) * area;
            image_processor_patch_(out, p, v, corner, w);
        }
    }
}

// room for the patches of so many frames of (h, w)
static inline Patches image_processor_room_(const ImageProcessor* p, int frames, int h, int w) {
    Patches patches;
    patches.grid = image_processor_grid(p, frames, h, w);
    patches.rows = (size_t)patches.grid.t * patches.grid.h * patches.grid.w;
    patches.columns = 3 * (size_t)p->temporal * p->patch * p->patch;
    patches.values = (float*)malloc_check(sizeof(float) * patches.rows * patches.columns, "patches of an image");
    return patches;
}

static inline int image_processor_alike_(const Image* frames, int n, ErrorText* error) {
    for (int i = 1; i < n; i++) {
        if (frames[i].height == frames[0].height && frames[i].width == frames[0].width) { continue; }
        return error_set(error, "frame %d: expected width %d, height %d as of the first, found %d, %d", i,
                         frames[0].width, frames[0].height, frames[i].width, frames[i].height);
    }
    return 1;
}

// of one image, or with is_video of n frames in their order; 1, or 0 with the reason and nothing to free
static inline int image_processor_patches(Patches* patches, const ImageProcessor* p, const Image* frames, int n,
                                          ErrorText* error) {
    int h = 0, w = 0;
    memset(patches, 0, sizeof *patches);
    if (!p->is_video) {
        assert(n == 1);
        if (!image_processor_resized(&h, &w, p, frames->height, frames->width, error)) { return 0; }
    } else if (!image_processor_alike_(frames, n, error) ||
               !image_processor_resized_video(&h, &w, p, n, frames->height, frames->width, error)) {
        return 0;
    }
    const PixelValues_ values = image_processor_values_(p);
    unsigned char* rgb = (unsigned char*)malloc_check(3 * (size_t)h * w, "resized image");
    *patches = image_processor_room_(p, n, h, w);
    for (int i = 0; i < n; i++) {
        const int copies = i + 1 < n ? 1 : p->temporal - i % p->temporal;  // the last one fills up its time
        image_resize(rgb, h, w, frames[i].rgb, frames[i].height, frames[i].width);
        image_processor_frame_(patches, p, &values, rgb, i, copies);
    }
    free(rgb);
    return 1;
}

static inline void patches_free(Patches* patches) {
    free(patches->values);
    memset(patches, 0, sizeof *patches);
}
#endif  // LLMC_IMAGE_PROCESSOR_H
