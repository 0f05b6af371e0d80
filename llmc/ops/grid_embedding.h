/*
Position embeddings of the patches of an image, sampled from a table of side x side learned rows that is laid over the
image, corner on corner: each patch gets a mean of the four rows around it (bilinear).
    table (side*side, C)   out (P, C)   taps (P, 4) rows of the table   weights (P, 4)
    grid_taps                 taps and weights of an image's patches, on the host
    grid_embedding_forward    out[p] += sum of weights[p][i] * table[taps[p][i]], i ascending, from 0
    grid_entries              of each row of the table where it was read, on the host: what backward goes by
    grid_embedding_backward   dtable (side*side, C) written: of a row the sum of weights * dout over its entries
Patches lie as patch_order.h says; all frames of an image have the same embeddings. With a grid of h x w patches row r
of it lies at r * (side - 1) / max(h - 1, 1).
Taps    in the order (y0, x0), (y0, x1), (y1, x0), (y1, x1); y1 = y0 + 1, but at most side - 1, where its weight is 0.
Entries first (side*side + 1), entry (4 P): number 4 p + i of a tap, ascending, those of row t from first[t] on.
Cost:   memory bound: forward 6 P C elements moved, backward as many and side*side C floats. The host has 4 P numbers.
Order:  forward one chain of madd, whose end is added to out; backward for each row one chain over its entries.
Source: huggingface/transformers, vision_utils.py; doc/qwen36.md "Images"
*/
#ifndef LLMC_GRID_EMBEDDING_H
#define LLMC_GRID_EMBEDDING_H
#include "../core/device.h"  // Device, cudaCheck
#include "../core/kernel.h"  // to_float, from_float
#include "../core/madd.h"    // madd
#include "patch_order.h"     // patch_place
#include <math.h>
#include <string.h>

enum { GRID_TAPS = 4 };

// ---- on the host ----

// of row or column i of n: the rows before and behind it on a side of the table, and what they weigh
static inline void grid_axis_(int taps[2], float weights[2], int i, int n, int side) {
    const float at = (float)i * (float)(side - 1) / (float)(n > 1 ? n - 1 : 1), before = floorf(at);
    for (int k = 0; k < 2; k++) {
        const int tap = (int)before + k;
        taps[k] = tap < side ? tap : side - 1;
        weights[k] = 1.0f - fabsf(at - before - (float)k);
    }
}

// of an image of frames x h x w patches
static inline void grid_taps(int* taps, float* weights, int frames, int h, int w, int merge, int side) {
    for (int p = 0; p < frames * h * w; p++) {
        int r, c, y[2], x[2];
        float wy[2], wx[2];
        patch_place(&r, &c, p % (h * w), w, merge);
        grid_axis_(y, wy, r, h, side);
        grid_axis_(x, wx, c, w, side);
        for (int i = 0; i < GRID_TAPS; i++) {
            taps[GRID_TAPS * p + i] = y[i / 2] * side + x[i % 2];
            weights[GRID_TAPS * p + i] = wy[i / 2] * wx[i % 2];
        }
    }
}

static inline void grid_entries(int* first, int* entry, const int* taps, int P, int rows) {
    for (int t = 0; t <= rows; t++) { first[t] = 0; }
    for (int k = 0; k < GRID_TAPS * P; k++) { first[taps[k] + 1]++; }
    for (int t = 0; t < rows; t++) { first[t + 1] += first[t]; }
    for (int k = 0; k < GRID_TAPS * P; k++) { entry[first[taps[k]]++] = k; }  // first[t] moves on to first[t + 1]
    for (int t = rows; t > 0; t--) { first[t] = first[t - 1]; }
    first[0] = 0;
}

// ---- plain C: read this first; it defines every bit ----

static inline void grid_embedding_forward_ref(float* out, const float* table, const int* taps, const float* weights,
                                              int P, int C) {
    for (size_t p = 0; p < (size_t)P; p++) {
        for (int c = 0; c < C; c++) {
            float sum = 0.0f;
            for (size_t k = GRID_TAPS * p; k < GRID_TAPS * (p + 1); k++) {
                sum = madd(weights[k], table[(size_t)taps[k] * C + c], sum);
            }
            out[p * C + c] += sum;
        }
    }
}

// NULL: nobody asks
static inline void grid_embedding_backward_ref(float* dtable, const float* dout, const int* first, const int* entry,
                                               const float* weights, int rows, int C) {
    for (size_t t = 0; t < (dtable ? (size_t)rows : 0); t++) {
        for (int c = 0; c < C; c++) {
            float sum = 0.0f;
            for (int e = first[t]; e < first[t + 1]; e++) {
                sum = madd(weights[entry[e]], dout[(size_t)(entry[e] / GRID_TAPS) * C + c], sum);
            }
            dtable[t * C + c] = sum;
        }
    }
}

#ifndef __CUDACC__  // ---- fast C: patches over threads forward, rows of the table backward ----

static inline void grid_embedding_forward(float* out, const float* table, const int* taps, const float* weights, int P,
                                          int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int p = 0; p < P; p++) {
        const int* t = taps + (size_t)GRID_TAPS * p;
        const float* w = weights + (size_t)GRID_TAPS * p;
        const float *a = table + (size_t)t[0] * C, *b = table + (size_t)t[1] * C;
        const float *d = table + (size_t)t[2] * C, *e = table + (size_t)t[3] * C;
        float* y = out + (size_t)p * C;
        #pragma omp simd
        for (int c = 0; c < C; c++) {
            y[c] += madd(w[3], e[c], madd(w[2], d[c], madd(w[1], b[c], madd(w[0], a[c], 0.0f))));
        }
    }
}

static inline void grid_embedding_backward(float* dtable, const float* dout, const int* first, const int* entry,
                                           const float* weights, int rows, int C, const Device* dev) {
    (void)dev;
    #pragma omp parallel for schedule(dynamic, 16)
    for (int t = 0; t < (dtable ? rows : 0); t++) {
        float* d = dtable + (size_t)t * C;
        memset(d, 0, sizeof(float) * (size_t)C);
        for (int e = first[t]; e < first[t + 1]; e++) {
            const float w = weights[entry[e]], *y = dout + (size_t)(entry[e] / GRID_TAPS) * C;
            #pragma omp simd
            for (int c = 0; c < C; c++) { d[c] = madd(w, y[c], d[c]); }
        }
    }
}
#else  // ---- CUDA: a thread for each element of out, and of the table ----

template <typename X>
__global__ void grid_embedding_forward_kernel(X* out, const X* table, const int* taps, const float* weights, int C) {
    const size_t p = blockIdx.x;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0.0f;
        for (size_t k = GRID_TAPS * p; k < GRID_TAPS * (p + 1); k++) {
            sum = madd(weights[k], to_float(table[(size_t)taps[k] * C + c]), sum);
        }
        out[p * C + c] = from_float<X>(to_float(out[p * C + c]) + sum);
    }
}

template <typename X>
__global__ void grid_embedding_backward_kernel(float* dtable, const X* dout, const int* first, const int* entry,
                                               const float* weights, int C) {
    const size_t t = blockIdx.x;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0.0f;
        for (int e = first[t]; e < first[t + 1]; e++) {
            sum = madd(weights[entry[e]], to_float(dout[(size_t)(entry[e] / GRID_TAPS) * C + c]), sum);
        }
        dtable[t * C + c] = sum;
    }
}

template <typename X>
static inline void grid_embedding_forward(X* out, const X* table, const int* taps, const float* weights, int P, int C,
                                          const Device* dev) {
    if (P == 0) { return; }
    grid_embedding_forward_kernel<<<(unsigned)P, GRID_BLOCK, 0, dev->stream>>>(out, table, taps, weights, C);
    cudaCheck(cudaGetLastError());
}

template <typename X>
static inline void grid_embedding_backward(float* dtable, const X* dout, const int* first, const int* entry,
                                           const float* weights, int rows, int C, const Device* dev) {
    if (!dtable) { return; }
    grid_embedding_backward_kernel<<<(unsigned)rows, GRID_BLOCK, 0, dev->stream>>>(dtable, dout, first, entry, weights,
                                                                                   C);
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_GRID_EMBEDDING_H
