/*
Device memory: host memory that is accounted for. Every allocation is as long as asked for, filled with NaN, and known by address:
copies are checked against it, the race check (simt_launch.h) saves and compares it, and what is never freed is reported at exit.
Under the address sanitizer it is closed while no kernel runs: host code that follows a device pointer is stopped.
*/
#ifndef SIMT_MEMORY_H
#define SIMT_MEMORY_H
#include "simt_fiber.h"
#include "simt_types.h"
#include <errno.h>
#include <map>
#include <pthread.h>
#include <stdarg.h>
#include <unistd.h>

struct SimtAllocation {
    size_t n_bytes;
    int number;        // counted from 1 in order of allocation
    int on_host;       // cudaMallocHost: pinned memory of the host, which kernels may also write
    const char* file;  // where it was allocated
    int line;
    char *before, *after;  // the race check's copies
};

struct SimtMemory {
    std::map<char*, SimtAllocation> allocations;  // by address
    int n_allocated;
    size_t n_bytes;
    int open;  // how many SimtAccess live
    pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;  // a thread may save a checkpoint beside the training
};
inline SimtMemory& simt_memory = *new SimtMemory();  // never destroyed: it is read at exit

// ---- errors: one line, then status 1. _exit, because half of the stacks in this process are not the C library's ----

static inline const char* simt_where();  // "kernel k, block (1,0,0), thread (5,0,0): " inside a kernel, else ""

__attribute__((noreturn, format(printf, 1, 2)))
static inline void simt_fail(const char* format, ...) {
    char text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "%s: simt: %s%s\n", program_invocation_short_name, simt_where(), text);
    fflush(stderr);
    _exit(1);
}

// ---- who may touch device memory ----

static inline void simt_poison_(char* p, size_t n_bytes, int closed) {
#if defined(__SANITIZE_ADDRESS__)
    if (closed) { __asan_poison_memory_region(p, n_bytes); } else { __asan_unpoison_memory_region(p, n_bytes); }
#else
    (void)p, (void)n_bytes, (void)closed;
#endif
}

// While one lives, device memory is open: kernels, copies and the stand-ins of libraries hold one.
struct SimtAccess {
    SimtAccess() {
        pthread_mutex_lock(&simt_memory.lock);
        if (simt_memory.open++ == 0) { all(0); }
    }
    ~SimtAccess() {
        if (--simt_memory.open == 0) { all(1); }
        pthread_mutex_unlock(&simt_memory.lock);
    }
    static void all(int closed) {
        for (auto& a : simt_memory.allocations) {
            if (!a.second.on_host) { simt_poison_(a.first, a.second.n_bytes, closed); }
        }
    }
};

// the allocation that holds address p, or NULL
static inline SimtAllocation* simt_find(const void* p, char** start) {
    auto next = simt_memory.allocations.upper_bound((char*)p);
    if (next == simt_memory.allocations.begin()) { return NULL; }
    --next;
    if ((char*)p >= next->first + (next->second.n_bytes ? next->second.n_bytes : 1)) { return NULL; }
    *start = next->first;
    return &next->second;
}

// ends the program unless p .. p + n_bytes lies in one allocation of the device (or in none of them, for the host's side)
static inline void simt_check_range(const char* call, const char* side, const void* p, size_t n_bytes, int device) {
    char* start = NULL;
    SimtAllocation* a = simt_find(p, &start);
    int found = a && !a->on_host;
    if (device && !found) { simt_fail("%s: %s %p is no device memory", call, side, p); }
    if (!device && found) { simt_fail("%s: %s %p is device memory (allocation %d), expected host memory", call, side, p, a->number); }
    if (a && (char*)p + n_bytes > start + a->n_bytes) {
        simt_fail("%s: %s of %zu bytes ends %zu bytes behind allocation %d (%zu bytes, %s:%d)", call, side, n_bytes,
                  (size_t)((char*)p + n_bytes - start - a->n_bytes), a->number, a->n_bytes, a->file, a->line);
    }
}

// ---- allocation ----

// on_exit: a program that ends well must have freed its device memory
static inline void simt_report_leaks_(int status, void*) {
    if (status != 0 || simt_memory.allocations.empty()) { return; }
    SimtAllocation& a = simt_memory.allocations.begin()->second;
    fflush(stdout);
    fprintf(stderr, "%s: simt: %zu allocations were never freed, among them number %d of %zu bytes from %s:%d\n",
            program_invocation_short_name, simt_memory.allocations.size(), a.number, a.n_bytes, a.file, a.line);
    _exit(1);
}

static inline void* simt_allocate(size_t n_bytes, int on_host, const char* file, int line) {
    if (simt_memory.n_allocated == 0) { on_exit(simt_report_leaks_, NULL); }
    void* p = NULL;
    if (posix_memalign(&p, 256, n_bytes ? n_bytes : 1) != 0) { return NULL; }
    SimtAccess access;
    memset(p, 0xff, n_bytes);  // NaN as float, double and bf16: nobody may count on zeros
    simt_memory.n_bytes += n_bytes;
    simt_memory.allocations[(char*)p] = SimtAllocation{n_bytes, ++simt_memory.n_allocated, on_host, file, line, NULL, NULL};
    return p;
}

static inline void simt_free(void* p, int on_host, const char* call) {
    if (!p) { return; }
    SimtAccess access;
    auto a = simt_memory.allocations.find((char*)p);
    if (a == simt_memory.allocations.end() || a->second.on_host != on_host) {
        simt_fail("%s: %p is no start of an allocation of %s", call, p, on_host ? "cudaMallocHost" : "cudaMalloc");
    }
    simt_memory.n_bytes -= a->second.n_bytes;
    simt_memory.allocations.erase(a);
    free(p);
}
#endif  // SIMT_MEMORY_H
