/*
Device memory: host memory that is accounted for. It comes from one region of addresses; every allocation begins with NaN, has
closed addresses behind it and is known by its place: copies are checked against it, and what is never freed is reported at exit.
Under the address sanitizer it is closed while no kernel runs: host code that follows a device pointer is stopped.

The race check (simt_launch.h) runs a kernel twice from the same memory, and few kernels write much of it. So while a kernel runs,
memory is write-protected; the first write to a piece of 64 KiB faults, and the handler keeps a copy of the piece and lets it through.
    simt_watch()         protect everything
    simt_keep_first()    what the written pieces hold now is the first result
    simt_rewind()        all written pieces are as they were at simt_watch
    simt_difference(&p)  the first byte that is not as in the first result
    simt_unwatch()       end
*/
#ifndef SIMT_MEMORY_H
#define SIMT_MEMORY_H
#include "simt_fiber.h"
#include "simt_types.h"
#include <errno.h>
#include <map>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <unistd.h>
#include <vector>

static const size_t SIMT_PIECE = 64 << 10;
static const size_t SIMT_MEMORY = (size_t)8 << 30, SIMT_REGION = 2 * SIMT_MEMORY;  // bytes to allocate; addresses

struct SimtAllocation {
    size_t n_bytes;
    int number;        // counted from 1 in order of allocation
    int on_host;       // cudaMallocHost: pinned memory of the host, which kernels may read
    const char* file;  // where it was allocated
    int line;
};

// what the bytes of one allocation in one piece held
struct SimtPiece {
    std::vector<char> before, first;  // at simt_watch; after the first run, empty until then
};

struct SimtMemory {
    std::map<char*, SimtAllocation> allocations;  // by address
    int n_allocated;
    size_t n_bytes;
    char* region;                                 // SIMT_REGION addresses; memory only where written
    char* end;                                    // behind the last allocation so far
    int watched, first_done;
    std::map<char*, SimtPiece> written;           // since simt_watch, by address
    struct sigaction before;                      // who handled faults before us
    int open;                                     // how many SimtAccess live
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

static inline void simt_fault_(int signal, siginfo_t* info, void* context);

static inline void simt_reserve_() {
    SimtMemory& m = simt_memory;
    m.region = (char*)mmap(NULL, SIMT_REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m.region == MAP_FAILED) { simt_fail("no addresses for device memory: %s", strerror(errno)); }
    char* reserved = m.region;
    m.region += 2 * SIMT_PIECE - (uintptr_t)m.region % SIMT_PIECE;
    m.end = m.region;
    simt_poison_(reserved, (size_t)(m.region - reserved), 1);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = simt_fault_;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &m.before);
    on_exit(simt_report_leaks_, NULL);
}

// no two allocations share a piece, and at least 4096 closed bytes lie between them
static inline size_t simt_pieces_(size_t n_bytes) { return (n_bytes + 4095 + SIMT_PIECE) / SIMT_PIECE * SIMT_PIECE; }

// the first gap between allocations that is large enough
static inline char* simt_place_(size_t n_bytes) {
    char* place = simt_memory.region;
    for (auto& a : simt_memory.allocations) {
        if (a.second.on_host) { continue; }
        if ((size_t)(a.first - place) >= n_bytes) { return place; }
        place = a.first + simt_pieces_(a.second.n_bytes);
    }
    return place + n_bytes <= simt_memory.region + SIMT_REGION - 2 * SIMT_PIECE ? place : NULL;
}

static inline void* simt_allocate(size_t n_bytes, int on_host, const char* file, int line) {
    SimtAccess access;
    SimtMemory& m = simt_memory;
    if (!m.region) { simt_reserve_(); }
    char* p = on_host ? (char*)malloc(n_bytes ? n_bytes : 1) : simt_place_(simt_pieces_(n_bytes));
    if (!p || m.n_bytes + n_bytes > SIMT_MEMORY) { return NULL; }
    if (!on_host) {
        simt_poison_(p, n_bytes, 0);
        simt_poison_(p + n_bytes, simt_pieces_(n_bytes) - n_bytes, 1);
        if (p + simt_pieces_(n_bytes) > m.end) { m.end = p + simt_pieces_(n_bytes); }
    }
    memset(p, 0xff, n_bytes);  // NaN as float, double and bf16: nobody may count on zeros
    m.n_bytes += n_bytes;
    m.allocations[p] = SimtAllocation{n_bytes, ++m.n_allocated, on_host, file, line};
    return p;
}

static inline void simt_free(void* p, int on_host, const char* call) {
    if (!p) { return; }
    SimtAccess access;
    auto a = simt_memory.allocations.find((char*)p);
    if (a == simt_memory.allocations.end() || a->second.on_host != on_host) {
        simt_fail("%s: %p is no start of an allocation of %s", call, p, on_host ? "cudaMallocHost" : "cudaMalloc");
    }
    size_t n_bytes = a->second.n_bytes;
    simt_memory.n_bytes -= n_bytes;
    simt_memory.allocations.erase(a);
    if (on_host) { free(p); return; }
    simt_poison_((char*)p, n_bytes, 1);
    madvise(p, simt_pieces_(n_bytes), MADV_DONTNEED);
}

// ---- the race check's view: which pieces were written, and what they held ----

static inline void simt_protect_(char* p, size_t n_bytes, int access) {
    if (n_bytes && mprotect(p, n_bytes, access) != 0) { simt_fail("mprotect: %s", strerror(errno)); }
}

static inline void simt_watch() {
    SimtMemory& m = simt_memory;
    if (!m.region) { simt_reserve_(); }
    m.watched = 1;
    m.first_done = 0;
    simt_protect_(m.region, (size_t)(m.end - m.region), PROT_READ);
}

static inline void simt_unwatch() {
    SimtMemory& m = simt_memory;
    m.watched = 0;
    m.written.clear();
    simt_protect_(m.region, (size_t)(m.end - m.region), PROT_READ | PROT_WRITE);
}

static inline void simt_keep_first() {
    for (auto& w : simt_memory.written) { w.second.first.assign(w.first, w.first + w.second.before.size()); }
    simt_memory.first_done = 1;
}

static inline void simt_rewind() {
    for (auto& w : simt_memory.written) { memcpy(w.first, w.second.before.data(), w.second.before.size()); }
}

// where memory is not as in the first result, and what that was; NULL: everywhere the same
static inline char* simt_difference(const char** first) {
    for (auto& w : simt_memory.written) {
        size_t n = w.second.first.size(), i = 0;
        if (memcmp(w.first, w.second.first.data(), n) == 0) { continue; }
        while (w.first[i] == w.second.first[i]) { i++; }
        *first = w.second.first.data() + i;
        return w.first + i;
    }
    return NULL;
}

// the first write to a protected piece; other faults go to whoever handled them before
static inline void simt_fault_(int signal, siginfo_t* info, void* context) {
    SimtMemory& m = simt_memory;
    char *at = (char*)info->si_addr, *start = NULL;
    if (m.watched && at >= m.region && at < m.end) {
        char* place = at - (at - m.region) % (ptrdiff_t)SIMT_PIECE;
        SimtAllocation* a = simt_find(place, &start);
        if (!a) { simt_fail("write to %p, where nothing is allocated", (void*)at); }
        size_t n = start + a->n_bytes - place < (ptrdiff_t)SIMT_PIECE ? (size_t)(start + a->n_bytes - place) : SIMT_PIECE;
        SimtPiece& piece = m.written[place];
        piece.before.assign(place, place + n);
        if (m.first_done) { piece.first = piece.before; }
        simt_protect_(place, SIMT_PIECE, PROT_READ | PROT_WRITE);
        return;
    }
    if (m.before.sa_flags & SA_SIGINFO) {  // the sanitizer's
        m.before.sa_sigaction(signal, info, context);
        return;
    }
    simt_fail("no memory at %p", (void*)at);
}
#endif  // SIMT_MEMORY_H
