// llmc/files/image.h and llmc/models/image_processor.h as a shared library, for dev/ref/check_images.py: plain
// functions that ctypes can call.
#include "llmc/files/image.h"            // Image, image_parse
#include "llmc/models/image_patches.h"   // image_patches_read, image_processor_patches

// A result of image_parse, kept for the calls that follow; NULL: refused, and the reason stands in `reason`
Image* shared_image_open(const unsigned char* bytes, size_t n_bytes, char* reason, size_t n_reason) {
    Image* image = (Image*)malloc_check(sizeof *image, "image");
    ErrorText error;
    error.text[0] = '\0';
    if (image_parse(image, bytes, n_bytes, &error)) { return image; }
    snprintf(reason, n_reason, "%s", error.text);
    free(image);
    return NULL;
}

// its height and width; the pixels stay until it is closed
const unsigned char* shared_image_pixels(const Image* image, int size[2]) {
    size[0] = image->height, size[1] = image->width;
    return image->rgb;
}

void shared_image_close(Image* image) {
    image_free(image);
    free(image);
}

void shared_image_resize(unsigned char* out, int h, int w, const unsigned char* inp, int height, int width) {
    image_resize(out, h, w, inp, height, width);
}

// NULL: refused
ImageProcessor* shared_processor_open(const char* config, int is_video, char* reason, size_t n_reason) {
    ImageProcessor* p = (ImageProcessor*)malloc_check(sizeof *p, "image processor");
    ErrorText error;
    json_t* json = json_loads(config, 0, NULL);
    error.text[0] = '\0';
    const int ok = image_processor_parse(p, json, is_video, &error);
    json_decref(json);
    if (ok) { return p; }
    snprintf(reason, n_reason, "%s", error.text);
    free(p);
    return NULL;
}

char* shared_processor_json(const ImageProcessor* p) { return json_text_doubles(image_processor_json(p), "config"); }

// 1, or 0 where it is refused
int shared_processor_size(int size[2], const ImageProcessor* p, int frames, int height, int width) {
    ErrorText error;
    return p->is_video ? image_processor_resized_video(&size[0], &size[1], p, frames, height, width, &error)
                       : image_processor_resized(&size[0], &size[1], p, height, width, &error);
}

// n frames (height, width, 3) one behind the other; grid (3), then rows and columns. NULL: refused
float* shared_processor_patches(const ImageProcessor* p, unsigned char* rgb, int n, int height, int width,
                                int grid[5]) {
    Patches patches;
    ErrorText error;
    Image* frames = (Image*)malloc_check(sizeof(Image) * (size_t)n, "frames");
    for (size_t i = 0; i < (size_t)n; i++) {
        frames[i].height = height, frames[i].width = width;
        frames[i].rgb = rgb + 3 * i * height * width;
    }
    const int ok = image_processor_patches(&patches, p, frames, n, &error);
    free(frames);
    if (!ok) { return NULL; }
    grid[0] = patches.grid.t, grid[1] = patches.grid.h, grid[2] = patches.grid.w;
    grid[3] = (int)patches.rows, grid[4] = (int)patches.columns;
    return patches.values;
}

// the same of an image file; NULL: refused, and the reason stands in `reason`
float* shared_processor_read(const ImageProcessor* p, const char* path, int grid[5], char* reason, size_t n_reason) {
    Patches patches;
    ErrorText error;
    if (!image_patches_read(&patches, p, path, &error)) {
        snprintf(reason, n_reason, "%s", error.text);
        return NULL;
    }
    grid[0] = patches.grid.t, grid[1] = patches.grid.h, grid[2] = patches.grid.w;
    grid[3] = (int)patches.rows, grid[4] = (int)patches.columns;
    return patches.values;
}

int shared_orientation(const unsigned char* exif, size_t n_bytes) { return orientation_of_exif(exif, n_bytes); }

void shared_free(void* p) { free(p); }
