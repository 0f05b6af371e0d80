/*
What a kernel may call: barriers, shuffles, votes, atomics, cache hints, bit and float functions of CUDA's programming guide.
*/
#ifndef SIMT_DEVICE_H
#define SIMT_DEVICE_H
#include "simt_launch.h"
#include <limits.h>
#include <math.h>
#include <time.h>

// ---- barriers of the block ----

static inline void __syncthreads(SIMT_SITE) { simt_barrier("__syncthreads", 0, file, line); }
static inline int __syncthreads_or(int p, SIMT_SITE) { return simt_barrier("__syncthreads_or", p, file, line).any; }
static inline int __syncthreads_and(int p, SIMT_SITE) { return simt_barrier("__syncthreads_and", p, file, line).all; }
static inline int __syncthreads_count(int p, SIMT_SITE) { return simt_barrier("__syncthreads_count", p, file, line).count; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}

// ---- warps ----

static inline void __syncwarp(unsigned mask = 0xffffffff, SIMT_SITE) {
    char part = 0;
    simt_collective("__syncwarp", mask, &part, NULL, file, line);
}

struct SimtShuffle {
    uint64_t value;
    int source;  // lane whose value is asked for
};
SIMT_TRUSTED static inline void simt_complete_shuffle_(void** parts, int n) {
    uint64_t values[SIMT_WARP] = {0};
    for (int i = 0; i < n; i++) {
        if (parts[i]) { values[i] = ((SimtShuffle*)parts[i])->value; }
    }
    for (int i = 0; i < n; i++) {
        if (!parts[i]) { continue; }
        SimtShuffle* s = (SimtShuffle*)parts[i];
        if (!parts[s->source]) { simt_fail("shuffle: lane %d asks for lane %d, which is not in the mask", i, s->source); }
        s->value = values[s->source];
    }
}

template <typename T>
static inline T simt_shuffle_(const char* what, unsigned mask, T value, int source, const char* file, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 64 bits");
    SimtShuffle s = {0, source};
    memcpy(&s.value, &value, sizeof(T));
    simt_collective(what, mask, &s, simt_complete_shuffle_, file, line);
    memcpy((void*)&value, &s.value, sizeof(T));
    return value;
}

static inline int simt_lane() { return simt_block.current % SIMT_WARP; }

// groups of `width` lanes, a power of two, shuffle among themselves; a source outside the group is the lane itself
template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
    return simt_shuffle_("__shfl_sync", mask, value, (simt_lane() & -width) + (source & (width - 1)), file, line);
}
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, SIMT_SITE) {
    int lane = simt_lane(), source = lane ^ flip;
    return simt_shuffle_("__shfl_xor_sync", mask, value, source < (lane & -width) + width ? source : lane, file, line);
}
template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
    int lane = simt_lane(), source = lane - (int)delta;
    return simt_shuffle_("__shfl_up_sync", mask, value, source >= (lane & -width) ? source : lane, file, line);
}
template <typename T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
    int lane = simt_lane(), source = lane + (int)delta;
    return simt_shuffle_("__shfl_down_sync", mask, value, source < (lane & -width) + width ? source : lane, file, line);
}

struct SimtBallot {
    int predicate;
    unsigned lanes;  // out: those whose predicate is not 0
};
SIMT_TRUSTED static inline void simt_complete_ballot_(void** parts, int n) {
    unsigned lanes = 0;
    for (int i = 0; i < n; i++) {
        if (parts[i] && ((SimtBallot*)parts[i])->predicate) { lanes |= 1u << i; }
    }
    for (int i = 0; i < n; i++) {
        if (parts[i]) { ((SimtBallot*)parts[i])->lanes = lanes; }
    }
}
static inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
    SimtBallot b = {predicate, 0};
    simt_collective("__ballot_sync", mask, &b, simt_complete_ballot_, file, line);
    return b.lanes;
}
static inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
    SimtBallot b = {predicate, 0};
    simt_collective("__any_sync", mask, &b, simt_complete_ballot_, file, line);
    return b.lanes != 0;
}
static inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
    SimtBallot b = {predicate, 0};
    simt_collective("__all_sync", mask, &b, simt_complete_ballot_, file, line);
    return b.lanes == mask;
}

struct SimtReduction {
    int value, most;
};
SIMT_TRUSTED static inline void simt_complete_reduction_(void** parts, int n) {
    int low = INT_MAX, high = INT_MIN;
    for (int i = 0; i < n; i++) {
        const SimtReduction* x = (const SimtReduction*)parts[i];
        if (x) { low = x->value < low ? x->value : low, high = x->value > high ? x->value : high; }
    }
    for (int i = 0; i < n; i++) {
        SimtReduction* x = (SimtReduction*)parts[i];
        if (x) { x->value = x->most ? high : low; }
    }
}
static inline int __reduce_min_sync(unsigned mask, int value, SIMT_SITE) {
    SimtReduction x = {value, 0};
    simt_collective("__reduce_min_sync", mask, &x, simt_complete_reduction_, file, line);
    return x.value;
}
static inline int __reduce_max_sync(unsigned mask, int value, SIMT_SITE) {
    SimtReduction x = {value, 1};
    simt_collective("__reduce_max_sync", mask, &x, simt_complete_reduction_, file, line);
    return x.value;
}

// which lanes happen to run together is no property of a program
template <typename T = void>
static inline unsigned __activemask() {
    static_assert(sizeof(T*) == 0, "__activemask() differs between machines: pass the mask that the code implies");
    return 0;
}

// ---- atomics: integers only, for a sum of floats depends on its order ----

template <typename T> struct SimtAtomic { static_assert(sizeof(T) == 0, "atomics are for 32 and 64 bit integers: a sum of floats depends on its order"); };
template <> struct SimtAtomic<int> {};
template <> struct SimtAtomic<unsigned> {};
template <> struct SimtAtomic<unsigned long long> {};
template <typename T> struct SimtSame { typedef T type; };  // a second argument that is converted, not deduced
#define SIMT_ATOMIC(name, expression)                                              \
    template <typename T> static inline T name(T* p, typename SimtSame<T>::type v) { \
        (void)sizeof(SimtAtomic<T>);                                               \
        T old = *p;                                                                \
        *p = (expression);                                                         \
        return old;                                                                \
    }
SIMT_ATOMIC(atomicAdd, old + v)
SIMT_ATOMIC(atomicSub, old - v)
SIMT_ATOMIC(atomicMax, old > v ? old : v)
SIMT_ATOMIC(atomicMin, old < v ? old : v)
SIMT_ATOMIC(atomicAnd, old & v)
SIMT_ATOMIC(atomicOr, old | v)
SIMT_ATOMIC(atomicXor, old ^ v)
SIMT_ATOMIC(atomicExch, v)
SIMT_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef SIMT_ATOMIC
template <typename T>
static inline T atomicCAS(T* p, typename SimtSame<T>::type expected, typename SimtSame<T>::type v) {
    (void)sizeof(SimtAtomic<T>);
    T old = *p;
    if (old == expected) { *p = v; }
    return old;
}

// ---- loads and stores with cache hints ----

template <typename T> static inline T __ldg(const T* p) { return *p; }
template <typename T> static inline T __ldcg(const T* p) { return *p; }
template <typename T> static inline T __ldca(const T* p) { return *p; }
template <typename T> static inline T __ldcs(const T* p) { return *p; }
template <typename T> static inline T __ldlu(const T* p) { return *p; }
template <typename T> static inline T __ldcv(const T* p) { return *p; }
template <typename T> static inline void __stwb(T* p, T v) { *p = v; }
template <typename T> static inline void __stcg(T* p, T v) { *p = v; }
template <typename T> static inline void __stcs(T* p, T v) { *p = v; }
template <typename T> static inline void __stwt(T* p, T v) { *p = v; }

// ---- bits ----

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) { r |= (x >> i & 1) << (31 - i); }
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline int __float_as_int(float x) { int i; memcpy(&i, &x, 4); return i; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static inline float __int_as_float(int i) { float x; memcpy(&x, &i, 4); return x; }
static inline long long __double_as_longlong(double x) { long long i; memcpy(&i, &x, 8); return i; }
static inline double __longlong_as_double(long long i) { double x; memcpy(&x, &i, 8); return x; }

// ---- float functions. Those of the hardware that are not correctly rounded are modelled by the C library's ----

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline float __int2float_rn(int i) { return (float)i; }
static inline float __uint2float_rn(unsigned i) { return (float)i; }
static inline float simt_exp_(float x) { return expf(x); }
static inline float simt_log_(float x) { return logf(x); }
// the C library declares functions of these names for itself
#define __expf(x) simt_exp_(x)
#define __logf(x) simt_log_(x)
#define __exp2f(x) exp2f(x)
#define __log2f(x) log2f(x)
#define __exp10f(x) exp10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)

// device code calls min and max on every arithmetic type; fminf's rule for NaN: the other one
#define SIMT_MIN_MAX(type)                                                  \
    static inline type min(type a, type b) { return b < a ? b : a; }        \
    static inline type max(type a, type b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

static inline long long clock64() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static inline void __nanosleep(unsigned) {}
static inline void __trap() { simt_fail("__trap()"); }
#endif  // SIMT_DEVICE_H
