/*
Device: what differs between machines, handed to every op as its last argument. On a CPU that is the number of threads
and a workspace for packed matrices; a CUDA build adds its stream and handles here. No op keeps state of its own.
Threads share OUTPUTS among themselves and never a sum, so their number cannot change a bit (doc/exactness.md rule 2).
*/
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H
#include "fail.h"  // fail_run
#include <float.h>
#include <stdint.h>
#include <sys/mman.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if FLT_EVAL_METHOD != 0 && FLT_EVAL_METHOD != 16  // 16: this CPU also has half precision
#error "float arithmetic must round to float (x87 does not): compile for SSE2 or newer"
#endif

typedef struct {
    float* memory;
    size_t n_bytes;
} Workspace;

typedef struct {
    int n_threads;
    Workspace* workspace;  // scratch of the op that runs now (device_workspace); nothing in it outlives the call
} Device;

// which thread of the parallel region this is: owner of its slice of the workspace
static inline int thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// ---- memory ----

#if defined(__SANITIZE_ADDRESS__)
#define ARENA_GUARDED 1  // the sanitizer sees what lies beyond an arena only if it comes from malloc
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_GUARDED 1
#endif
#endif

static inline size_t arena_round_(size_t n_bytes) {
    const size_t huge = 2u << 20;
    return (n_bytes + huge - 1) / huge * huge;
}

// zeroed memory straight from the kernel, on huge pages where it offers them: pages that are never touched cost nothing
static inline void* arena_alloc(size_t n_bytes, const char* what) {
#ifdef ARENA_GUARDED
    void* p = NULL;
    if (posix_memalign(&p, 64, n_bytes ? n_bytes : 1) != 0) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return memset(p, 0, n_bytes);
#else
    size_t rounded = arena_round_(n_bytes ? n_bytes : 1);
    void* p = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { fail_run("%s: no memory for %zu bytes: %s", what, n_bytes, strerror(errno)); }
    madvise(p, rounded, MADV_HUGEPAGE);  // a wish: a kernel without huge pages may refuse it
    return p;
#endif
}

static inline void arena_free(void* p, size_t n_bytes) {
#ifdef ARENA_GUARDED
    (void)n_bytes;
    free(p);
#else
    if (p) { munmap(p, arena_round_(n_bytes ? n_bytes : 1)); }
#endif
}

// a library linked with fast-math switches subnormals off for the whole process; then no bit below is ours
static inline int subnormals_kept(void) {
    volatile float smallest = FLT_MIN, half = 0.5f;
    volatile float x = smallest * half;
    return x != 0.0f && x + x == smallest;
}

// as many threads as --threads asks for; 0: one per core
static inline int device_threads(int asked) {
#ifdef _OPENMP
    return asked > 0 ? asked : omp_get_max_threads();
#else
    (void)asked;
    return 1;
#endif
}

// One Device at a time: its thread count is the process's, and the workspace is sized by it. n_threads 0: one per core
static inline void device_init(Device* dev, int n_threads) {
    if (!subnormals_kept()) { fail_run("this process flushes subnormal floats to zero: some library was linked with fast-math"); }
    dev->n_threads = device_threads(n_threads);
#ifdef _OPENMP
    omp_set_num_threads(dev->n_threads);
#endif
    dev->workspace = (Workspace*)calloc(1, sizeof(Workspace));
    if (!dev->workspace) { fail_run("device: no memory"); }
}

// scratch of at least n_bytes, kept from call to call: it grows in the first step and stays. Never inside a parallel region
static inline float* device_workspace(const Device* dev, size_t n_bytes) {
    Workspace* w = dev->workspace;
    if (w->n_bytes < n_bytes) {
        arena_free(w->memory, w->n_bytes);
        w->memory = (float*)arena_alloc(n_bytes, "workspace");
        w->n_bytes = n_bytes;
#ifdef ARENA_GUARDED
        memset(w->memory, 0xff, n_bytes);  // NaN: nobody may count on zeros
#endif
    }
    return w->memory;
}

static inline void device_free(Device* dev) {
    arena_free(dev->workspace->memory, dev->workspace->n_bytes);
    free(dev->workspace);
    dev->workspace = NULL;
}
#endif  // LLMC_DEVICE_H
