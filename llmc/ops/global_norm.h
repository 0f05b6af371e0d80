/*
Sum of squares of gradients, for the global norm: the same number in whatever order, and by however many, it is added.
    NormSum      what is known so far of all that belongs together; norm_sum_init: of nothing. It is device memory while
                 kernels write to it
    norm_see     first for every array g (n) of them: the largest |g|
    norm_add     then for every array again: its squares
    norm_try     both at once for every array, in units of a largest |g| that is expected (norm_sum_expecting)...
    norm_is_done ...which was right if this is true, once all have joined: else norm_restart, then norm_add
    norm_join    what others have seen, or added, joins; on the host
    norm_value   the sum of squares; norm = (float)sqrt of it
norm_see and norm_add do not wait for the device.
Cost:   memory bound, n floats read twice; by norm_try once, if what is expected has the exponent of what is found, as
        that of the update before often does. CUDA: 16 bytes a load; two products in double and two conversions for an
        element, which A100, H100 and H200 do faster than memory delivers, consumer cards do not; four atomics of each
        block. H200, 2026-11-28, in a bench, norm_try of 124 million: 0.127 ms, 3.9 of a copy's 4.2 TB/s; GPT-2's 16
        arrays 0.187.
Order:  none. Let E >= -126 be the smallest number with |g| < 2^E for every g. Each g^2 is cut off towards zero to a
        whole number of units of 2^(2E - 62), at most 2^62 of them. Whole numbers add up without rounding: threads,
        ranks and atomics may take them as they come. They are counted in digits of 31 bits; two roundings make a double
        of these at the end. A square and its product with a power of two are exact in double: C, EXACT and fast
        kernels agree.
Error:  less than a unit per element, and the largest square, unless it is that of a subnormal, has at least 2^60 of
        these: n elements lose less than n 2^-60 of the sum. If a g is not finite the sum is NaN or infinite.
Source: doc/exactness.md rule 4
*/
#ifndef LLMC_GLOBAL_NORM_H
#define LLMC_GLOBAL_NORM_H
#include "../core/device.h"  // Device, ceil_div
#include "../core/kernel.h"  // Pack, grid_first
#include <math.h>
#include <string.h>

enum { NORM_DIGITS = 3, NORM_BITS = 31 };
#define NORM_NONE 0x7f800000u  // no finite number

typedef struct {
    uint32_t largest;             // the bits of the largest |g|, which are ordered as the floats are
    uint32_t expected;            // ... of what norm_try counts with; NORM_NONE: ranks did not expect the same
    uint64_t digit[NORM_DIGITS];  // units of 2^(2E - 62), 2^31 and 2^62 of these
} NormSum;

#ifdef __CUDACC__
#define NORM_FUNCTION static inline __host__ __device__
#else
#define NORM_FUNCTION static inline
#endif

static inline NormSum norm_sum_init(void) {
    const NormSum none = {0, 0, {0, 0, 0}};
    return none;
}

NORM_FUNCTION int norm_is_finite_(uint32_t largest) { return largest < NORM_NONE; }
NORM_FUNCTION int norm_exponent_(uint32_t largest) { return (int)(largest >> 23) - 126; }

// largest: of another sum, or 0
static inline NormSum norm_sum_expecting(uint32_t largest) {
    NormSum sum = norm_sum_init();
    sum.expected = norm_is_finite_(largest) ? largest : 0;
    return sum;
}
static inline int norm_is_done(const NormSum* sum) {
    return !norm_is_finite_(sum->largest) || norm_exponent_(sum->largest) == norm_exponent_(sum->expected);
}
static inline void norm_restart(NormSum* sum) { memset(sum->digit, 0, sizeof sum->digit); }

// the bits of |g|
NORM_FUNCTION uint32_t norm_bits_(float g) {
    uint32_t bits;
    memcpy(&bits, &g, sizeof bits);
    return bits & 0x7fffffffu;
}

// g^2 in units, scale being 2^-E: the high digit comes back, the low one in *low
NORM_FUNCTION int32_t norm_square_(float g, double scale, int32_t* low) {
    const double x = (double)g * scale, square = x * (x * 0x1p31);
    const int32_t high = (int32_t)square;
    *low = (int32_t)((square - (double)high) * 0x1p31);
    return high;
}

// sums of high and of low digits, not yet carried, as three digits
NORM_FUNCTION void norm_carry_(uint64_t digit[NORM_DIGITS], uint64_t high, uint64_t low) {
    const uint64_t mask = (1u << NORM_BITS) - 1;
    high += low >> NORM_BITS;
    digit[0] = low & mask;
    digit[1] = high & mask;
    digit[2] = high >> NORM_BITS;
}

static inline void norm_see_ref(NormSum* sum, const float* g, size_t n) {
    for (size_t i = 0; i < n; i++) { sum->largest = norm_bits_(g[i]) > sum->largest ? norm_bits_(g[i]) : sum->largest; }
}

static inline void norm_add_ref(NormSum* sum, const float* g, size_t n) {
    const double scale = ldexp(1.0, -norm_exponent_(sum->largest));
    for (size_t i = 0; i < n && norm_is_finite_(sum->largest); i++) {
        int32_t low;
        uint64_t digit[NORM_DIGITS];
        const int32_t high = norm_square_(g[i], scale, &low);
        norm_carry_(digit, (uint64_t)high, (uint64_t)low);
        for (int k = 0; k < NORM_DIGITS; k++) { sum->digit[k] += digit[k]; }
    }
}

// what `other` has seen and added of other arrays
static inline void norm_join(NormSum* sum, const NormSum* other) {
    sum->expected = sum->expected == other->expected ? sum->expected : NORM_NONE;
    sum->largest = other->largest > sum->largest ? other->largest : sum->largest;
    for (int k = 0; k < NORM_DIGITS; k++) { sum->digit[k] += other->digit[k]; }
}

NORM_FUNCTION double norm_value(const NormSum* sum) {
    float largest;
    uint64_t digit[NORM_DIGITS];
    memcpy(&largest, &sum->largest, sizeof largest);
    if (!norm_is_finite_(sum->largest)) { return (double)largest; }
    norm_carry_(digit, sum->digit[1], sum->digit[0]);
    const double units = (double)(sum->digit[2] + digit[2]) + ((double)digit[1] * 0x1p-31 + (double)digit[0] * 0x1p-62);
    return ldexp(units, 2 * norm_exponent_(sum->largest));
}

#ifndef __CUDACC__
enum { NORM_BLOCK = 1 << 16 };  // elements that a thread takes at a time

static inline void norm_see(NormSum* sum, const float* g, size_t n, const Device* dev) {
    uint32_t largest = sum->largest;
    (void)dev;
    #pragma omp parallel for simd schedule(static) reduction(max : largest) if (parallel : n > FEW_ELEMENTS)
    for (size_t i = 0; i < n; i++) { largest = norm_bits_(g[i]) > largest ? norm_bits_(g[i]) : largest; }
    sum->largest = largest;
}

static inline int64_t norm_cut_(int64_t units, int64_t* low) {
    *low = units & ((1u << NORM_BITS) - 1);
    return units >> NORM_BITS;
}

// norm_square_ of what is smaller than 2^E = 1 / scale, 0 of anything else; `end` has the bits of 2^E. By doubles where
// an instruction makes whole numbers of 64 bits of them; by whole numbers where each may be shifted by its own count
static inline int64_t norm_digits_(float g, double scale, uint32_t end, int64_t* low) {
    const uint32_t bits = norm_bits_(g);
#if defined(__AVX512DQ__)
    const double root = (double)(bits < end ? g : 0.0f) * (scale * 0x1p31);
    return norm_cut_((int64_t)(root * root), low);
#elif defined(__AVX2__)
    const uint32_t power = bits >> 23, fraction = (bits & 0x7fffffu) << 7;
    const uint32_t m = power ? fraction | 1u << 30 : fraction << 1;  // |g| = m 2^(power - 157)
    const uint32_t shift = 2 * ((end >> 23) - 1 - power);            // more than 63 for what is too large
    (void)scale;
    return norm_cut_((int64_t)((uint64_t)m * m >> (shift < 63 ? shift : 63)), low);
#else
    int32_t rest;
    const int32_t high = norm_square_(bits < end ? g : 0.0f, scale, &rest);
    *low = rest;
    return high;
#endif
}

// the squares of all that is smaller than `end`, given as bits. Returns the bits of the largest of all
static inline uint32_t norm_add_block_(uint64_t digit[NORM_DIGITS], const float* g, size_t n, double scale,
                                       uint32_t end) {
    int64_t high = 0, low = 0;
    uint32_t largest = 0;
    #pragma omp simd reduction(+ : high, low) reduction(max : largest)
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = norm_bits_(g[i]);
        int64_t rest;
        largest = bits > largest ? bits : largest;
        high += norm_digits_(g[i], scale, end, &rest);
        low += rest;
    }
    norm_carry_(digit, (uint64_t)high, (uint64_t)low);
    return largest;
}

// in units of this exponent
static inline void norm_add_in_(NormSum* sum, const float* g, size_t n, int exponent) {
    const double scale = ldexp(1.0, -exponent);
    const uint32_t end = (uint32_t)(exponent + 127) << 23;
    const int64_t n_blocks = ceil_div((int64_t)n, NORM_BLOCK);
    uint64_t a = 0, b = 0, c = 0;
    uint32_t largest = sum->largest;
    #pragma omp parallel for schedule(static) reduction(+ : a, b, c) reduction(max : largest) if (n_blocks > 1)
    for (int64_t block = 0; block < n_blocks; block++) {
        const size_t i = (size_t)block * NORM_BLOCK;
        uint64_t digit[NORM_DIGITS];
        const size_t n_block = n - i < NORM_BLOCK ? n - i : (size_t)NORM_BLOCK;
        const uint32_t seen = norm_add_block_(digit, g + i, n_block, scale, end);
        largest = seen > largest ? seen : largest;
        a += digit[0], b += digit[1], c += digit[2];
    }
    sum->largest = largest;
    sum->digit[0] += a, sum->digit[1] += b, sum->digit[2] += c;
}

static inline void norm_add(NormSum* sum, const float* g, size_t n, const Device* dev) {
    (void)dev;
    if (norm_is_finite_(sum->largest)) { norm_add_in_(sum, g, n, norm_exponent_(sum->largest)); }
}

// what is larger than expected is not added, for then another pass comes
static inline void norm_try(NormSum* sum, const float* g, size_t n, const Device* dev) {
    (void)dev;
    norm_add_in_(sum, g, n, norm_exponent_(sum->expected));
}

#else  // ---- CUDA: each thread walks over the array, a block joins what its threads have ----

// of a thread, a warp or a block; digits are not yet carried
typedef struct {
    uint32_t largest;
    uint64_t high, low;
} NormPart;

// g^2 in units, scale being 2^-E: as norm_square_, in one conversion
__device__ inline void norm_count_(NormPart* part, float g, double scale) {
    const double root = (double)g * (scale * 0x1p31);
    const uint64_t units = (uint64_t)(root * root);
    part->high += units >> NORM_BITS;
    part->low += units & ((1u << NORM_BITS) - 1);
}

// whole packs, then one by one the last elements, fewer than a pack
template <int W, typename Take>
__device__ inline void norm_walk_(const float* g, size_t n, Take take) {
    const size_t whole = n / W * W;
    for (size_t i = grid_first<W>(); i < whole; i += grid_step<W>()) {
        const Pack<float, W> x = pack_load<W>(g + i);
        for (int k = 0; k < W; k++) { take(x.x[k]); }
    }
    for (size_t i = whole + grid_first<1>(); i < n; i += grid_step<1>()) { take(g[i]); }
}

// what all 32 lanes have
__device__ inline NormPart norm_join_lanes_(NormPart part) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, part.largest, step);
        part.largest = other > part.largest ? other : part.largest;
        part.high += __shfl_xor_sync(ALL_LANES, part.high, step);
        part.low += __shfl_xor_sync(ALL_LANES, part.low, step);
    }
    return part;
}

// What a block has joins *sum, by its first thread alone: atomics at one address wait for each other, about 1 ns each
__device__ inline void norm_join_block_(NormSum* sum, NormPart part) {
    __shared__ NormPart of_warp[WARP];
    const NormPart nothing = {0, 0, 0};
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;
    uint64_t digit[NORM_DIGITS];
    part = norm_join_lanes_(part);
    if (lane == 0) { of_warp[warp] = part; }
    __syncthreads();
    if (warp > 0) { return; }
    part = norm_join_lanes_(lane < n_warps ? of_warp[lane] : nothing);
    if (lane > 0) { return; }
    norm_carry_(digit, part.high, part.low);
    if (part.largest > 0) { atomicMax(&sum->largest, part.largest); }
    for (int k = 0; k < NORM_DIGITS; k++) {
        if (digit[k] > 0) { atomicAdd((unsigned long long*)&sum->digit[k], (unsigned long long)digit[k]); }
    }
}

template <int W>
__global__ void norm_see_kernel(NormSum* sum, const float* g, size_t n) {
    NormPart part = {0, 0, 0};
    norm_walk_<W>(g, n, [&](float x) { part.largest = norm_bits_(x) > part.largest ? norm_bits_(x) : part.largest; });
    norm_join_block_(sum, part);
}

template <int W>
__global__ void norm_add_kernel(NormSum* sum, const float* g, size_t n) {
    const uint32_t largest = sum->largest;
    if (!norm_is_finite_(largest)) { return; }
    const double scale = ldexp(1.0, -norm_exponent_(largest));
    NormPart part = {0, 0, 0};
    norm_walk_<W>(g, n, [&](float x) { norm_count_(&part, x, scale); });
    norm_join_block_(sum, part);
}

// what is larger than expected is not added, for then another pass comes
template <int W>
__global__ void norm_try_kernel(NormSum* sum, const float* g, size_t n) {
    const int exponent = norm_exponent_(sum->expected);
    const double scale = ldexp(1.0, -exponent);
    NormPart part = {0, 0, 0};
    norm_walk_<W>(g, n, [&](float x) {
        const uint32_t bits = norm_bits_(x);
        part.largest = bits > part.largest ? bits : part.largest;
        norm_count_(&part, norm_exponent_(bits) > exponent ? 0.0f : x, scale);
    });
    norm_join_block_(sum, part);
}

static inline void norm_see(NormSum* sum, const float* g, size_t n, const Device* dev) {
    const int W = pack_width<float>();
    const unsigned blocks = grid_blocks(n, W, dev);
    if (n == 0) { return; }
    if (pack_aligned(g)) { norm_see_kernel<W><<<blocks, GRID_BLOCK, 0, dev->stream>>>(sum, g, n); }
    else { norm_see_kernel<1><<<blocks, GRID_BLOCK, 0, dev->stream>>>(sum, g, n); }
    cudaCheck(cudaGetLastError());
}

static inline void norm_try(NormSum* sum, const float* g, size_t n, const Device* dev) {
    const int W = pack_width<float>();
    const unsigned blocks = grid_blocks(n, W, dev);
    if (n == 0) { return; }
    if (pack_aligned(g)) { norm_try_kernel<W><<<blocks, GRID_BLOCK, 0, dev->stream>>>(sum, g, n); }
    else { norm_try_kernel<1><<<blocks, GRID_BLOCK, 0, dev->stream>>>(sum, g, n); }
    cudaCheck(cudaGetLastError());
}

static inline void norm_add(NormSum* sum, const float* g, size_t n, const Device* dev) {
    const int W = pack_width<float>();
    const unsigned blocks = grid_blocks(n, W, dev);
    if (n == 0) { return; }
    if (pack_aligned(g)) { norm_add_kernel<W><<<blocks, GRID_BLOCK, 0, dev->stream>>>(sum, g, n); }
    else { norm_add_kernel<1><<<blocks, GRID_BLOCK, 0, dev->stream>>>(sum, g, n); }
    cudaCheck(cudaGetLastError());
}
#endif
#endif  // LLMC_GLOBAL_NORM_H
