/*
Device: what differs between machines, handed to every op as its last argument. On a CPU that is the number of threads
and a workspace for packed matrices; a CUDA build adds its stream and its cuBLASLt handle. No op keeps state of its own.
Threads share OUTPUTS among themselves and never a sum, so their number cannot change a bit (doc/exactness.md rule 2).

Device memory, what ops read and write, is the GPU's in a CUDA build and ordinary memory elsewhere; these calls are all
that a trainer needs to know of the difference:
    device_alloc, device_release        zeroed memory for arenas
    device_zero, device_copy            on the device, in the order of ops
    device_upload                       from the host. Memory of device_pinned is read later, while the host goes on
    device_download                     to the host: waits for every op before it
    device_sync                         waits, and stops if a kernel has failed
    device_workspace                    scratch of the op that runs now
    device_widened                      of a GPU: what that op reads of a matrix that is stored otherwise
    device_fell_back                    of a GPU: a fast kernel did not take a call
    device_say_fallbacks                how often that was, for the end of a run
*/
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H
#include "fail.h"  // fail_run
#include <float.h>
#include <stdint.h>
#include <sys/mman.h>
#ifdef __CUDACC__
#include <cublasLt.h>
#include <cuda_runtime.h>
#endif
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

#ifdef __CUDACC__
// how cuBLASLt does the products that it was asked for: gemm_cublas.h, which makes it with the first product
typedef struct CublasCache CublasCache;
typedef struct {
    CublasCache* cache;
} CublasPlans;
#endif

#ifdef __CUDACC__
// Calls that a library or a kernel for tensor cores did not take, so that a plain kernel of ours did, some 20 times
// slower, or one in fp8 bf16; and what the first of them was
typedef struct {
    int64_t n;
    char first[80];
} Fallback;
typedef enum {
    FALLBACK_PRODUCT, FALLBACK_GELU, FALLBACK_ALGORITHM, FALLBACK_ATTENTION, FALLBACK_FP8, FALLBACK_KINDS
} FallbackKind;
#endif

typedef struct {
    int n_threads;
    Workspace* workspace;  // scratch of the op that runs now (device_workspace); nothing in it outlives the call
#ifdef __CUDACC__
    cudaStream_t stream;   // of every kernel: one begins when the one before has ended
    cublasLtHandle_t blas;
    CublasPlans* plans;
    Fallback* fallbacks;   // [FALLBACK_KINDS]
    Workspace* widened;    // matrices that are stored in fewer bytes, as a product reads them: ops/widen.h
    int n_sms;             // multiprocessors of this GPU
    int most_shared;       // bytes of shared memory that a block may ask for
#endif
} Device;

// do the ranks of one machine share the memory that device_alloc takes?
#ifdef __CUDACC__
enum { DEVICE_IS_SHARED = 0 };
#else
enum { DEVICE_IS_SHARED = 1 };
#endif

#ifdef __CUDACC__
#define cudaCheck(call) cuda_check_((call), #call, __FILE__, __LINE__)
static inline void cuda_check_(cudaError_t error, const char* call, const char* file, int line) {
    if (error != cudaSuccess) { fail_run("%s:%d: %s: %s", file, line, call, cudaGetErrorString(error)); }
}

#define cublasCheck(call) cublas_check_((call), #call, __FILE__, __LINE__)
static inline void cublas_check_(cublasStatus_t status, const char* call, const char* file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) { fail_run("%s:%d: %s: cuBLASLt status %d", file, line, call, (int)status); }
}
#endif

// which thread of the parallel region this is: owner of its slice of the workspace
static inline int thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// a loop over so many elements, with a few operations each, is done before another thread is awake
enum { FEW_ELEMENTS = 1 << 15 };

static inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// ---- memory ----

#if defined(__SANITIZE_ADDRESS__)
#define ARENA_GUARDED 1  // the sanitizer sees what lies beyond an arena only if it comes from malloc
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ARENA_GUARDED 1
#endif
#endif

#define HUGE_PAGE ((size_t)2 << 20)

static inline size_t arena_round_(size_t n_bytes) { return (n_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }

// Zeroed memory straight from the kernel, on huge pages where it offers them: pages never touched cost nothing. What
// fills no huge page lies on small ones, or each arena would take up to 2 MiB more than the box says
static inline void* arena_alloc(size_t n_bytes, const char* what) {
#ifdef ARENA_GUARDED
    void* p = NULL;
    if (posix_memalign(&p, 64, n_bytes ? n_bytes : 1) != 0) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return memset(p, 0, n_bytes);
#else
    size_t rounded = arena_round_(n_bytes ? n_bytes : 1);
    void* p = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) { fail_run("%s: no memory for %zu bytes: %s", what, n_bytes, strerror(errno)); }
    madvise(p, n_bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);  // a wish: a kernel without them may refuse it
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
static inline int device_subnormals_kept_(void) {
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

// as many threads take part in what follows: dev->n_threads, or 1 where they would wait longer for each other than work
static inline void device_team(int n_threads) {
#ifdef _OPENMP
    omp_set_num_threads(n_threads);
#else
    (void)n_threads;
#endif
}

// One Device at a time: its thread count is the process's, and the workspace is sized by it. n_threads 0: one per core
static inline void device_init(Device* dev, int n_threads) {
    if (!device_subnormals_kept_()) {
        fail_run("this process flushes subnormal floats to zero: some library was linked with fast-math");
    }
    dev->n_threads = device_threads(n_threads);
    device_team(dev->n_threads);
    dev->workspace = (Workspace*)calloc(1, sizeof(Workspace));
    if (!dev->workspace) { fail_run("device: no memory"); }
#ifdef __CUDACC__
    int gpu = 0;
    cudaCheck(cudaGetDevice(&gpu));
    cudaCheck(cudaDeviceGetAttribute(&dev->n_sms, cudaDevAttrMultiProcessorCount, gpu));
    cudaCheck(cudaDeviceGetAttribute(&dev->most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu));
    cudaCheck(cudaStreamCreate(&dev->stream));
    cublasCheck(cublasLtCreate(&dev->blas));
    dev->plans = (CublasPlans*)calloc(1, sizeof(CublasPlans));
    dev->widened = (Workspace*)calloc(1, sizeof(Workspace));
    dev->fallbacks = (Fallback*)calloc(FALLBACK_KINDS, sizeof(Fallback));
    if (!dev->plans || !dev->widened || !dev->fallbacks) { fail_run("device: no memory"); }
#endif
}

#ifdef __CUDACC__  // ---- memory of the GPU ----

// which GPU this process has: rank `local_rank` of this machine takes one of its own. Before device_init
static inline void device_choose(int local_rank) {
    int n_gpus = 0;
    cudaError_t error = cudaGetDeviceCount(&n_gpus);
    if (error != cudaSuccess || n_gpus == 0) {
        const char* name = program_invocation_short_name;  // of further ranks "train_qwen3 [rank 1]"
        fail_run("no GPU here that CUDA can use (%s): `make %.*s CPU=1` builds it for CPUs", cudaGetErrorString(error),
                 (int)strcspn(name, " "), name);
    }
    if (local_rank >= n_gpus) {
        fail_run("rank %d of this machine has no GPU of its own: expected at most %d ranks here, one per GPU",
                 local_rank, n_gpus);
    }
    cudaCheck(cudaSetDevice(local_rank));
}

static inline void* device_alloc(size_t n_bytes, const char* what) {
    void* p = NULL;
    cudaError_t error = cudaMalloc(&p, n_bytes ? n_bytes : 1);
    if (error != cudaSuccess) {
        fail_run("%s: no memory on the GPU for %zu bytes: %s", what, n_bytes, cudaGetErrorString(error));
    }
    cudaCheck(cudaMemset(p, 0, n_bytes ? n_bytes : 1));
    return p;
}

static inline void device_release(void* p, size_t n_bytes) {
    (void)n_bytes;
    if (p) { cudaCheck(cudaFree(p)); }  // a process without a GPU plans, too
}

static inline void device_zero(void* p, size_t n_bytes, const Device* dev) {
    cudaCheck(cudaMemsetAsync(p, 0, n_bytes, dev->stream));
}

static inline void device_copy(void* to, const void* from, size_t n_bytes, const Device* dev) {
    cudaCheck(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToDevice, dev->stream));
}

// n strips of n_bytes each, which begin every to_stride and from_stride bytes
static inline void device_copy_strips(void* to, size_t to_stride, const void* from, size_t from_stride, size_t n_bytes,
                                      int n, const Device* dev) {
    cudaCheck(cudaMemcpy2DAsync(to, to_stride, from, from_stride, n_bytes, (size_t)n, cudaMemcpyDeviceToDevice,
                                dev->stream));
}

static inline void device_upload(void* to, const void* from_host, size_t n_bytes, const Device* dev) {
    cudaCheck(cudaMemcpyAsync(to, from_host, n_bytes, cudaMemcpyHostToDevice, dev->stream));
}

static inline void device_sync(const Device* dev) { cudaCheck(cudaStreamSynchronize(dev->stream)); }

static inline void device_download(void* to_host, const void* from, size_t n_bytes, const Device* dev) {
    cudaCheck(cudaMemcpyAsync(to_host, from, n_bytes, cudaMemcpyDeviceToHost, dev->stream));
    device_sync(dev);
}

// host memory that the GPU reads by itself
static inline void* device_pinned(size_t n_bytes, const char* what) {
    void* p = NULL;
    cudaError_t error = cudaMallocHost(&p, n_bytes ? n_bytes : 1);
    if (error != cudaSuccess) {
        fail_run("%s: no pinned memory for %zu bytes: %s", what, n_bytes, cudaGetErrorString(error));
    }
    return p;
}

static inline void device_pinned_free(void* p) {
    if (p) { cudaCheck(cudaFreeHost(p)); }  // unlike cudaFree, its manual says nothing of NULL
}

#else  // ---- no GPU: device memory is memory ----

static inline void device_choose(int local_rank) { (void)local_rank; }
static inline void* device_alloc(size_t n_bytes, const char* what) { return arena_alloc(n_bytes, what); }
static inline void device_release(void* p, size_t n_bytes) { arena_free(p, n_bytes); }
static inline void device_sync(const Device* dev) { (void)dev; }

static inline void device_zero(void* p, size_t n_bytes, const Device* dev) {
    (void)dev;
    memset(p, 0, n_bytes);
}

static inline void device_copy(void* to, const void* from, size_t n_bytes, const Device* dev) {
    (void)dev;
    memcpy(to, from, n_bytes);
}

static inline void device_copy_strips(void* to, size_t to_stride, const void* from, size_t from_stride, size_t n_bytes,
                                      int n, const Device* dev) {
    (void)dev;
    #pragma omp parallel for
    for (int i = 0; i < n; i++) {
        memcpy((char*)to + to_stride * (size_t)i, (const char*)from + from_stride * (size_t)i, n_bytes);
    }
}

static inline void device_upload(void* to, const void* from_host, size_t n_bytes, const Device* dev) {
    device_copy(to, from_host, n_bytes, dev);
}
static inline void device_download(void* to_host, const void* from, size_t n_bytes, const Device* dev) {
    device_copy(to_host, from, n_bytes, dev);
}

static inline void* device_pinned(size_t n_bytes, const char* what) {
    void* p = malloc(n_bytes ? n_bytes : 1);
    if (!p) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return p;
}

static inline void device_pinned_free(void* p) { free(p); }
#endif

// at least n_bytes, kept from call to call: it grows in the first step and stays
static inline float* device_room_(Workspace* w, size_t n_bytes, const char* what) {
    if (w->n_bytes < n_bytes) {
        device_release(w->memory, w->n_bytes);
        w->memory = (float*)device_alloc(n_bytes, what);
        w->n_bytes = n_bytes;
#if defined(ARENA_GUARDED) && !defined(__CUDACC__)
        memset(w->memory, 0xff, n_bytes);  // NaN: nobody may count on zeros
#endif
    }
    return w->memory;
}

// scratch of the op that runs now. Never inside a parallel region
static inline float* device_workspace(const Device* dev, size_t n_bytes) {
    return device_room_(dev->workspace, n_bytes, "workspace");
}

#ifdef __CUDACC__
// what an op reads that has scratch of its own
static inline void* device_widened(const Device* dev, size_t n_bytes) {
    return device_room_(dev->widened, n_bytes, "a matrix as products read it");
}
#endif

// ---- calls that a fast kernel did not take ----

#ifdef __CUDACC__
__attribute__((format(printf, 3, 4)))
static inline void device_fell_back(const Device* dev, FallbackKind kind, const char* shape, ...) {
    Fallback* f = &dev->fallbacks[kind];
    if (f->n++ > 0) { return; }
    va_list arguments;
    va_start(arguments, shape);
    vsnprintf(f->first, sizeof f->first, shape, arguments);
    va_end(arguments);
}

// a line for each kind of which there were some; returns how many calls of all. A graph's count when it is recorded
static inline int64_t device_say_fallbacks(const Device* dev, FILE* to) {
    static const char* const what[FALLBACK_KINDS] = {
        "products by a plain kernel, which cuBLASLt did not take", "GELUs apart, whose product cuBLASLt did not take",
        "algorithms of gemm_algorithms.h, which cuBLASLt did not offer",
        "attentions by plain kernels, which those for tensor cores did not take",
        "products in fp8 by bf16, which cuBLASLt did not take"};
    int64_t n = 0;
    for (int kind = 0; kind < FALLBACK_KINDS; kind++) {
        const Fallback* f = &dev->fallbacks[kind];
        if (f->n > 0) { fprintf(to, "slow: %lld %s: the first %s\n", (long long)f->n, what[kind], f->first); }
        n += f->n;
    }
    return n;
}
#else
static inline int64_t device_say_fallbacks(const Device* dev, FILE* to) {
    (void)dev, (void)to;
    return 0;
}
#endif

static inline void device_free(Device* dev) {
    device_release(dev->workspace->memory, dev->workspace->n_bytes);
    free(dev->workspace);
    dev->workspace = NULL;
#ifdef __CUDACC__
    device_release(dev->widened->memory, dev->widened->n_bytes);
    free(dev->widened);
    free(dev->fallbacks);
    free(dev->plans->cache);
    free(dev->plans);
    cublasCheck(cublasLtDestroy(dev->blas));
    cudaCheck(cudaStreamDestroy(dev->stream));
#endif
}
#endif  // LLMC_DEVICE_H
