/*
An image in another size: bicubic, smoothed where it shrinks. The bytes are those of Pillow's
Image.resize((w, h), BICUBIC), which image processors of models were trained with.
    inp (height, width, 3)    out (out_height, out_width, 3)    bytes, RGB
First all rows become out_width long, then all columns out_height; but columns first where the height shrinks, by more
than twice as many pixels as the width (Pillow 13; before it rows were always first). Each pass gives bytes, so the
order shows. A side that stays as it is has no pass. In a pass an output pixel is a weighted mean of the input pixels
around it. With scale = n_inp / n_out and stretch = max(scale, 1), the output pixel i lies at centre = (i + 0.5) * scale
of the input, and
    weight(j) ~ cubic((j + 0.5 - centre) / stretch), for j + 0.5 within 2 * stretch of the centre and within the image
    cubic(x) = 1.5 |x|^3 - 2.5 |x|^2 + 1 below 1;  -0.5 |x|^3 + 2.5 |x|^2 - 4 |x| + 2 below 2;  0 beyond
so that a shrinking image is averaged over 4 * scale pixels. The weights are divided by their sum in double, then become
whole numbers of 2^-22, to the nearest; out = (sum of weight * inp + 2^21) >> 22, kept within 0..255.
Cost:   one core of an AMD EPYC, from 4032 x 3024 to 1312 x 992: 5.8 ns an input pixel, Pillow's own 8.1.
Order:  of doubles: weights are computed, added and divided for rising j; sums of whole numbers have no order. They
        stay below 2^31: the sizes of weights add up to 1.6 at most, times 255 * 2^22.
Source: Keys 1981, "Cubic convolution interpolation for digital image processing", a = -0.5; python-pillow/Pillow,
        Resample.c, for the fixed point and for where the window begins and ends.  Explained in doc/images.md
*/
#ifndef LLMC_IMAGE_RESIZE_H
#define LLMC_IMAGE_RESIZE_H
#include "../core/fail.h"  // malloc_check
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { RESIZE_BITS = 22 };  // of a weight behind the point: 8 more for a byte, one for the sign, one for sums above 1

// what the pixels of one side become of: output i has n[i] inputs from first[i] on
typedef struct {
    int n_out, most;       // most inputs of an output
    int *first, *n;        // (n_out)
    int32_t* weight;       // (n_out, most)
} ResizeWeights;

static inline double image_resize_cubic_(double x) {
    x = fabs(x);
    if (x < 1.0) { return (1.5 * x - 2.5) * x * x + 1.0; }
    return x < 2.0 ? (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 : 0.0;
}

// the weights of output i; real (most): scratch
static inline void image_resize_weigh_(ResizeWeights* w, int i, int n_inp, double* real) {
    const double scale = (double)n_inp / w->n_out, stretch = scale < 1.0 ? 1.0 : scale, shrink = 1.0 / stretch;
    const double centre = (i + 0.5) * scale, reach = 2.0 * stretch;
    const int from = (int)(centre - reach + 0.5), to = (int)(centre + reach + 0.5);  // from below 0 goes up to 0
    const int first = from < 0 ? 0 : from, n = (to > n_inp ? n_inp : to) - first;
    double sum = 0.0;
    for (int j = 0; j < n; j++) {
        real[j] = image_resize_cubic_((j + first - centre + 0.5) * shrink);
        sum += real[j];
    }
    for (int j = 0; j < n; j++) {
        const double fixed = real[j] / sum * (1 << RESIZE_BITS);
        w->weight[(size_t)i * w->most + j] = (int32_t)(fixed < 0.0 ? fixed - 0.5 : fixed + 0.5);
    }
    w->first[i] = first;
    w->n[i] = n;
}

static inline ResizeWeights image_resize_weights(int n_inp, int n_out) {
    const double scale = (double)n_inp / n_out, stretch = scale < 1.0 ? 1.0 : scale;
    ResizeWeights w = {n_out, (int)ceil(2.0 * stretch) * 2 + 1, NULL, NULL, NULL};
    const size_t n = (size_t)n_out;
    w.first = (int*)malloc_check(sizeof(int) * 2 * n, "windows of a resized image");
    w.n = w.first + n;
    w.weight = (int32_t*)malloc_check(sizeof(int32_t) * n * w.most, "weights of a resized image");
    double* real = (double*)malloc_check(sizeof(double) * (size_t)w.most, "weights of a resized image");
    for (int i = 0; i < n_out; i++) { image_resize_weigh_(&w, i, n_inp, real); }
    free(real);
    return w;
}

static inline void image_resize_weights_free(ResizeWeights* w) {
    free(w->first);
    free(w->weight);
    w->first = NULL, w->weight = NULL;
}

// >> of a negative number rounds down, on every compiler that we know
static inline unsigned char image_resize_byte_(int32_t sum) {
    const int32_t x = (sum + (1 << (RESIZE_BITS - 1))) >> RESIZE_BITS;
    return (unsigned char)(x < 0 ? 0 : x > 255 ? 255 : x);
}

// 64 bits: a side may have 2^27 pixels
static inline int image_resize_columns_first(int out_height, int out_width, int height, int width) {
    return out_height < height && (int64_t)height - out_height > 2 * ((int64_t)width - out_width);
}

// ---- plain C: read this first; it defines every byte ----

// out (rows, n_out, columns) of inp (rows, n_inp, columns): of an image (height, width, 3) this resizes its width with
// columns 3, its height with rows 1 and columns 3 * width
static inline void image_resize_pass_ref(unsigned char* out, const unsigned char* inp, const ResizeWeights* w, int rows,
                                         int n_inp, size_t columns) {
    for (size_t r = 0; r < (size_t)rows; r++) {
        for (size_t i = 0; i < (size_t)w->n_out; i++) {
            const int32_t* weight = w->weight + i * w->most;
            for (size_t c = 0; c < columns; c++) {
                int32_t sum = 0;
                for (int j = 0; j < w->n[i]; j++) {
                    sum += weight[j] * inp[(r * n_inp + w->first[i] + j) * columns + c];
                }
                out[(r * w->n_out + i) * columns + c] = image_resize_byte_(sum);
            }
        }
    }
}

// ---- fast C: rows over threads ----

// of a row of pixels; the three sums stay in registers
static inline void image_resize_row_(unsigned char* out, const unsigned char* inp, const ResizeWeights* w) {
    for (int i = 0; i < w->n_out; i++, out += 3) {
        const int32_t* weight = w->weight + (size_t)i * w->most;
        const unsigned char* pixel = inp + 3 * (size_t)w->first[i];
        int32_t red = 0, green = 0, blue = 0;
        for (int j = 0; j < w->n[i]; j++, pixel += 3) {
            red += weight[j] * pixel[0];
            green += weight[j] * pixel[1];
            blue += weight[j] * pixel[2];
        }
        out[0] = image_resize_byte_(red);
        out[1] = image_resize_byte_(green);
        out[2] = image_resize_byte_(blue);
    }
}

// output row i of all columns, a few of them at a time: their sums stay in the first cache
static inline void image_resize_column_(unsigned char* out, const unsigned char* inp, const ResizeWeights* w, int i,
                                        size_t columns) {
    enum { AT_ONCE = 1024 };
    int32_t sum[AT_ONCE];
    const int32_t* weight = w->weight + (size_t)i * w->most;
    for (size_t from = 0; from < columns; from += AT_ONCE) {
        const int n = columns - from < AT_ONCE ? (int)(columns - from) : AT_ONCE;
        for (int c = 0; c < n; c++) { sum[c] = 0; }
        for (int j = 0; j < w->n[i]; j++) {
            const unsigned char* row = inp + ((size_t)w->first[i] + j) * columns + from;
            const int32_t by = weight[j];
            for (int c = 0; c < n; c++) { sum[c] += by * row[c]; }
        }
        for (int c = 0; c < n; c++) { out[from + c] = image_resize_byte_(sum[c]); }
    }
}

static inline void image_resize_rows_(unsigned char* out, int out_width, const unsigned char* inp, int height,
                                      int width) {
    ResizeWeights w = image_resize_weights(width, out_width);
    #pragma omp parallel for
    for (int y = 0; y < height; y++) {
        image_resize_row_(out + 3 * (size_t)out_width * y, inp + 3 * (size_t)width * y, &w);
    }
    image_resize_weights_free(&w);
}

static inline void image_resize_columns_(unsigned char* out, int out_height, const unsigned char* inp, int height,
                                         int width) {
    ResizeWeights w = image_resize_weights(height, out_height);
    const size_t row = 3 * (size_t)width;
    #pragma omp parallel for
    for (int y = 0; y < out_height; y++) { image_resize_column_(out + row * y, inp, &w, y, row); }
    image_resize_weights_free(&w);
}

static inline void image_resize(unsigned char* out, int out_height, int out_width, const unsigned char* inp, int height,
                                int width) {
    const int columns_first = image_resize_columns_first(out_height, out_width, height, width);
    const size_t n_between = 3 * (columns_first ? (size_t)out_height * width : (size_t)height * out_width);
    if (height == out_height && width == out_width) { memcpy(out, inp, n_between); }
    else if (height == out_height) { image_resize_rows_(out, out_width, inp, height, width); }
    else if (width == out_width) { image_resize_columns_(out, out_height, inp, height, width); }
    if (height == out_height || width == out_width) { return; }
    unsigned char* between = (unsigned char*)malloc_check(n_between, "half-way to a resized image");
    if (columns_first) {
        image_resize_columns_(between, out_height, inp, height, width);
        image_resize_rows_(out, out_width, between, out_height, width);
    } else {
        image_resize_rows_(between, out_width, inp, height, width);
        image_resize_columns_(out, out_height, between, height, out_width);
    }
    free(between);
}
#endif  // LLMC_IMAGE_RESIZE_H
