/*
What kernels are written with: a warp works on a row, lanes load 16 bytes at a time, and one source makes two builds.
    EXACT   every sum is the chain of the plain loop and every function is fmath.h's: the bits of the C code. For
            parity, learning and debugging. X is float, and nvcc is told --fmad=false
    fast    each lane keeps a sum of its own, added up along a tree; exp and tanh are the hardware's. X is float or bf16
A kernel says row_add and row_total and is right in both:
    float sum = 0.0f;
    for (int c = lane; c - lane < C; c += WARP) { sum = row_add(sum, c < C ? to_float(x[c]) : 0.0f); }
    sum = row_total(sum);                                              // the same in all 32 lanes
Adding the 0 of a lane beyond the row changes no bit: a sum of floats that began at +0 is never -0. A chain of products
(row_madd) may be, for one that is too small for any float rounds to -0: lanes beyond the row multiply -0 by 0.
    Pack<X, W>        W elements that one lane loads and stores at once; pack_width<X>() is 16 bytes of them, and 1
                      where rows do not divide or a pointer lies between (pack_aligned): the launcher picks
    load_floats<W>(p), store_floats(p, pack)  W elements as floats; more than 16 bytes go in several packs
    row_add(sum, pack.x)  lane 0's W elements, then lane 1's, ...; row_madd(a.x, b.x, sum): their products
    to_float, from_float  X to float and back, rounding to nearest even
    grid_first, grid_step, grid_blocks  the threads of a grid walk over n elements, W at a time
    kernel_exp            in EXACT builds correctly rounded, else the hardware's approximation
    kernel_exp2           2^x, the hardware's approximation: for fast builds alone; exp(x) is kernel_exp2(x * LOG2_E)
    forgotten             a number that no register keeps from one turn of a loop to the next
Explained in doc/kernels.md
*/
#ifndef LLMC_KERNEL_H
#define LLMC_KERNEL_H
#ifdef __CUDACC__
#include "device.h"  // Device, ceil_div
#include "fmath.h"   // fm_exp
#include "madd.h"    // madd
#include <cuda_bf16.h>

enum { WARP = 32 };
static const unsigned ALL_LANES = 0xffffffffu;
static const float LOG2_E = 1.44269504f;

typedef __nv_bfloat16 bf16;

// x, of which the compiler knows no more: what a loop makes of it is made anew each time and lies in no register
// meanwhile
__device__ inline int forgotten(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <typename X> __device__ inline X from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// the type of a pointer that may be NULL: it says nothing about X, the other arguments do
template <typename X>
struct MaybeNull {
    typedef X type;
};

// ---- loads and stores of W elements at once ----

template <typename X, int W>
struct alignas(sizeof(X) * W) Pack {
    X x[W];
};

// elements in 16 bytes
template <typename X> __host__ __device__ constexpr int pack_width() { return 16 / (int)sizeof(X); }

// may rows of C elements that begin at p be taken in whole packs?
template <typename X>
static inline int pack_fits(const X* p, int64_t C) { return C % pack_width<X>() == 0 && (uintptr_t)p % 16 == 0; }

template <int W, typename X>
__device__ inline Pack<X, W> pack_load(const X* p) { return *reinterpret_cast<const Pack<X, W>*>(p); }
template <int W, typename X>
__device__ inline void pack_store(X* p, Pack<X, W> pack) { *reinterpret_cast<Pack<X, W>*>(p) = pack; }

template <typename... P>
static inline int pack_aligned(const P*... p) { return (((uintptr_t)p | ...) % 16) == 0; }

template <int W, typename X>
__device__ inline Pack<float, W> load_floats(const X* p) {
    constexpr int step = W < pack_width<X>() ? W : pack_width<X>();
    Pack<float, W> y;
    for (int i = 0; i < W; i += step) {
        Pack<X, step> x = pack_load<step>(p + i);
        for (int j = 0; j < step; j++) { y.x[i + j] = to_float(x.x[j]); }
    }
    return y;
}

template <int W, typename X>
__device__ inline void store_floats(X* p, const Pack<float, W>& y) {
    constexpr int step = W < pack_width<X>() ? W : pack_width<X>();
    for (int i = 0; i < W; i += step) {
        Pack<X, step> x;
        for (int j = 0; j < step; j++) { x.x[j] = from_float<X>(y.x[i + j]); }
        pack_store(p + i, x);
    }
}

// ---- element by element: for (size_t i = grid_first<W>(); i < n; i += grid_step<W>()) ----

enum { GRID_BLOCK = 256 };

template <int W>
__device__ inline size_t grid_first() { return ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; }
template <int W>
__device__ inline size_t grid_step() { return (size_t)gridDim.x * blockDim.x * W; }

// blocks of GRID_BLOCK threads: as many as run at once, 2048 threads on each multiprocessor, or fewer for a small n
static inline unsigned grid_blocks(size_t n, int W, const Device* dev) {
    int64_t needed = ceil_div((int64_t)n, (int64_t)W * GRID_BLOCK), at_once = (int64_t)dev->n_sms * (2048 / GRID_BLOCK);
    return (unsigned)(needed < at_once ? needed : at_once);
}

// how many of n elements go in whole packs of W: all but a rest, or none where a pointer lies between
template <typename... P>
static inline size_t pack_part(size_t n, int W, const P*... p) {
    return pack_aligned(p...) ? n / (size_t)W * (size_t)W : 0;
}

// ---- sums and maxima over the 32 lanes of a row ----

__device__ inline float lane_sum(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) { x += __shfl_xor_sync(ALL_LANES, x, step); }
    return x;
}

__device__ inline float row_max(float x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        float other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

// sum + the elements of all lanes, lane 0's first (EXACT), or + those of this lane alone
template <int W>
__device__ inline float row_add(float sum, const float (&x)[W]) {
#ifdef EXACT
    // every lane goes on from the sum of the lane before; that of lane `lane` is right
    for (int lane = 0; lane < WARP; lane++) {
        for (int i = 0; i < W; i++) { sum += x[i]; }
        sum = __shfl_sync(ALL_LANES, sum, lane);
    }
#else
    for (int i = 0; i < W; i++) { sum += x[i]; }
#endif
    return sum;
}

__device__ inline float row_add(float sum, float x) {
    const float one[1] = {x};
    return row_add(sum, one);
}

// the same of products: sum = madd(a, b, sum)
template <int W>
__device__ inline float row_madd(const float (&a)[W], const float (&b)[W], float sum) {
#ifdef EXACT
    for (int lane = 0; lane < WARP; lane++) {
        for (int i = 0; i < W; i++) { sum = madd(a[i], b[i], sum); }
        sum = __shfl_sync(ALL_LANES, sum, lane);
    }
#else
    for (int i = 0; i < W; i++) { sum = madd(a[i], b[i], sum); }
#endif
    return sum;
}

__device__ inline float row_madd(float a, float b, float sum) {
    const float one_a[1] = {a}, one_b[1] = {b};
    return row_madd(one_a, one_b, sum);
}

__device__ inline float row_total(float sum) {
#ifdef EXACT
    return sum;
#else
    return lane_sum(sum);
#endif
}

__device__ inline float kernel_exp(float x) {
#ifdef EXACT
    return fm_exp(x);
#else
    return __expf(x);
#endif
}

// 2^x by the hardware, 2 ulp; 0 below 2^-126. A third of the instructions of kernel_exp, which minds what is smaller
__device__ inline float kernel_exp2(float x) {
#ifdef SIMT
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}
#endif  // __CUDACC__
#endif  // LLMC_KERNEL_H
