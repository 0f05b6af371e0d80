/*
From an image file to what a vision tower reads (image_processor.h). This header alone needs libpng and libjpeg.
    image_patches_read    PNG or JPEG: Patches, with their grid
Errors: 0 with the reason, which does not name the file, and nothing to free.
*/
#ifndef LLMC_IMAGE_PATCHES_H
#define LLMC_IMAGE_PATCHES_H
#include "../files/image.h"   // image_read, image_free
#include "image_processor.h"  // Patches, image_processor_patches

static inline int image_patches_read(Patches* patches, const ImageProcessor* p, const char* path, ErrorText* error) {
    Image image;
    memset(patches, 0, sizeof *patches);
    if (!image_read(&image, path, error)) { return 0; }
    const int ok = image_processor_patches(patches, p, &image, 1, error);
    patches->n_decoded = (size_t)image.height * (size_t)image.width;
    image_free(&image);
    return ok;
}
#endif  // LLMC_IMAGE_PATCHES_H
