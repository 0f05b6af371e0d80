/*
An image in memory: RGB, 8 bits a channel, rows from the top down.
    image_room_    room for as many pixels as a file says it has, or the reason why not
    image_free
A few bytes of a file can stand for any number of pixels, so their number is bounded before memory is taken: by default
IMAGE_MOST_PIXELS, above which Pillow refuses too (twice its MAX_IMAGE_PIXELS); they take 537 MB.
*/
#ifndef LLMC_PIXELS_H
#define LLMC_PIXELS_H
#include "../core/mapfile.h"  // ErrorText, error_set, malloc_check

enum { IMAGE_MOST_PIXELS = 178956970 };

typedef struct {
    int height, width;
    unsigned char* rgb;  // (height, width, 3), on the heap
} Image;

static inline int image_room_(Image* image, size_t height, size_t width, size_t most_pixels, ErrorText* error) {
    if (height == 0 || width == 0) {
        return error_set(error, "expected an image of at least one pixel, found width %zu, height %zu", width, height);
    }
    if (height > most_pixels / width) {
        return error_set(error, "expected an image of at most %zu pixels, found width %zu, height %zu: scale it down",
                         most_pixels, width, height);
    }
    image->height = (int)height;
    image->width = (int)width;
    image->rgb = (unsigned char*)malloc_check(3 * height * width, "pixels of an image");
    return 1;
}

static inline void image_free(Image* image) {
    free(image->rgb);
    memset(image, 0, sizeof *image);
}
#endif  // LLMC_PIXELS_H
