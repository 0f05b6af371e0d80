/*
Dropout: in training each element is left out with probability p, the others are made larger, so that the mean stays.
    out = inp / (1 - p) where the element stays, 0 where not           n elements; out may be inp
Backward is the same call on the gradient: which elements stay is not stored but computed again.
Which ones: element i of site s in an update stays when bits(i) >= p * 2^32, with
    bits(i) = upper half of splitmix64(splitmix64(key, s), first + i)  key: dropout_key of seed and step
first is the number in the whole update of the leaf's first element at this site: row in the update, position,
channel. So what stays does not depend on ranks, threads, leaves, --recompute or a resume, and an update that is
computed twice is the same. A Dropout that is all zero leaves everything as it is and costs nothing: validation, text,
--probe.
Cost:   a multiplication or two of 64 bits an element, and one read and write where out is not inp.
Order:  element by element; 1 / (1 - p) is rounded to float once.
Error:  one rounding, to X: bf16 2^-8 |out|.
Source: Srivastava et al. 2014, JMLR 15; a counter in place of a state: Salmon et al. 2011, doi:10.1145/2063384.2063405
*/
#ifndef LLMC_DROPOUT_H
#define LLMC_DROPOUT_H
#include "../core/device.h"  // Device
#include "../core/kernel.h"  // load_floats, store_floats, grid_first, grid_step, grid_blocks, pack_part
#include "../core/rng.h"     // splitmix64, FM_FUNCTION: for host and device

typedef struct {
    float p;         // 0: nothing is left out
    uint64_t key;    // of this update
    uint64_t first;  // element of the update, at each site
} Dropout;

enum { DROPOUT_STREAM = 1 };  // of the seed; 0 is that of rounding (noise_key_of)

static inline uint64_t dropout_key(uint64_t seed, uint64_t step) {
    return splitmix64(splitmix64(seed, DROPOUT_STREAM), step);
}

// what all elements of a site have in common
typedef struct {
    uint64_t key, first;
    uint32_t threshold;
    float scale;
} DropoutSite;

static inline DropoutSite dropout_site_(const Dropout* d, int site) {
    const DropoutSite s = {splitmix64(d->key, (uint64_t)site), d->first, (uint32_t)((double)d->p * 4294967296.0),
                           1.0f / (1.0f - d->p)};
    return s;
}

FM_FUNCTION float dropout_element_(float x, DropoutSite s, uint64_t i) {
    const uint32_t bits = (uint32_t)(splitmix64(s.key, s.first + i) >> 32);
    return bits < s.threshold ? 0.0f : x * s.scale;
}

static inline void dropout_ref(float* out, const float* inp, const Dropout* d, int site, size_t n) {
    const uint64_t key = splitmix64(d->key, (uint64_t)site);
    const float scale = 1.0f / (1.0f - d->p);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = splitmix64(key, d->first + i) >> 32;
        const int stays = (double)bits >= floor((double)d->p * 4294967296.0);
        out[i] = stays ? inp[i] * scale : 0.0f;
    }
}

// where the result is comes back: in out or, with nothing to leave out, still in inp
#ifndef __CUDACC__
static inline const float* dropout(float* out, const float* inp, const Dropout* d, int site, size_t n,
                                   const Device* dev) {
    (void)dev;
    if (d->p == 0.0f) { return inp; }
    const DropoutSite s = dropout_site_(d, site);
    #pragma omp parallel for simd schedule(static)
    for (size_t i = 0; i < n; i++) { out[i] = dropout_element_(inp[i], s, i); }
    return out;
}

#else  // ---- CUDA: one bit pattern in both builds as float, since each output is one product ----

template <int W, typename X>
__global__ void dropout_kernel(X* out, const X* inp, DropoutSite s, size_t n) {
    for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) {
        Pack<float, W> x = load_floats<W>(inp + i);
        for (int j = 0; j < W; j++) { x.x[j] = dropout_element_(x.x[j], s, i + j); }
        store_floats(out + i, x);
    }
}

template <typename X>
static inline const X* dropout(X* out, const X* inp, const Dropout* d, int site, size_t n, const Device* dev) {
    if (d->p == 0.0f || n == 0) { return inp; }
    constexpr int W = pack_width<X>();
    DropoutSite s = dropout_site_(d, site);
    const size_t packed = pack_part(n, W, out, inp), rest = n - packed;
    if (packed) {
        dropout_kernel<W><<<grid_blocks(packed, W, dev), GRID_BLOCK, 0, dev->stream>>>(out, inp, s, packed);
    }
    if (rest) {
        s.first += packed;
        dropout_kernel<1>
            <<<grid_blocks(rest, 1, dev), GRID_BLOCK, 0, dev->stream>>>(out + packed, inp + packed, s, rest);
    }
    cudaCheck(cudaGetLastError());
    return out;
}
#endif
#endif  // LLMC_DROPOUT_H
