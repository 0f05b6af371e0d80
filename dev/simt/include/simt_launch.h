/*
How a kernel runs here: block after block, and in a block one thread at a time, each a fiber (simt_fiber.h).
A thread runs until it must wait: at a barrier, or at a warp collective (shuffle, vote, mma). The thread that arrives last does
the work of all that waited, and they become ready. Then the ready thread that comes FIRST IN THE ORDER runs.

The order is what a GPU leaves open, so a kernel's result must not depend on it. Every launch runs under two or more orders
from the same memory, and the bytes it leaves in every allocation must be the same (SIMT_ORDERS=n: how many; 1 switches it off):
    order 0   blocks, warps and lanes ascending; shared memory starts as bytes 0xff (NaN)
    order 1   all of them descending;            shared memory starts as bytes 0x7f (a huge number)
    order n   all of them shuffled by n;         shared memory starts as another byte
Between two barriers any two threads run once in either order: one that reads what the other writes sees it in one run only.
*/
#ifndef SIMT_LAUNCH_H
#define SIMT_LAUNCH_H
#include "simt_memory.h"
#include <string>
#include <vector>

enum { SIMT_WARP = 32, SIMT_MAX_THREADS = 1024, SIMT_STATIC_SHARED = 48 << 10, SIMT_MAX_SHARED = 227 << 10 };
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
static constexpr int warpSize = SIMT_WARP;

typedef enum { SIMT_READY, SIMT_AT_BARRIER, SIMT_AT_WARP, SIMT_EXITED } SimtState;

// One waiting place: every thread that waits there hands over a pointer to its own part of the work, on its own stack.
// complete(parts, n) is called once, by the last to arrive: parts[i] belongs to lane i (thread i), NULL if it takes no part.
typedef void (*SimtComplete)(void** parts, int n);

// an asynchronous copy under way (simt_mma.h)
struct SimtCopy {
    char* to;
    const char* from;
    int n_bytes, n_valid, group;
};

struct SimtThread {
    Fiber fiber;
    SimtState state;
    uint3 index;
    const char* waits_for;  // "__syncthreads"
    const char* file;
    int line;
    unsigned mask;          // lanes of a warp collective
    void* part;
    std::vector<SimtCopy> copies;
    int n_groups;           // of copies, committed so far
};

struct SimtShared {  // one `__shared__` declaration
    const void* key;
    const char* name;
    char* memory;
    size_t n_bytes;
};

// the lanes of one warp, a bit each
struct SimtLanes {
    unsigned exist, wait, returned;
};

struct SimtBlock {
    const char* kernel;  // NULL: no kernel runs
    void (*body)(void* arguments);
    void* arguments;
    int n_threads, n_live, order;
    int n_at_barrier, first_at_barrier;
    int current;         // number of the thread that runs, -1: none
    int released;        // whom the thread that ran made ready: 0, SIMT_AT_WARP its warp, SIMT_AT_BARRIER the block
    SimtThread threads[SIMT_MAX_THREADS];
    SimtLanes lanes[SIMT_MAX_THREADS / SIMT_WARP];
    int turns[SIMT_MAX_THREADS];  // the order of the threads: turns[0] goes first; a warp's lanes stand together
    std::vector<SimtShared> shared;
    char* dynamic_shared;
    size_t dynamic_shared_bytes;
};
inline SimtBlock& simt_block = *new SimtBlock();

static inline const char* simt_where() {
    static char text[256];
    SimtBlock& b = simt_block;
    text[0] = 0;
    if (b.kernel && b.current >= 0) {
        snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", b.kernel, blockIdx.x, blockIdx.y,
                 blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    } else if (b.kernel) {
        snprintf(text, sizeof text, "kernel %s, block (%u,%u,%u): ", b.kernel, blockIdx.x, blockIdx.y, blockIdx.z);
    }
    return text;
}

#if defined(__SANITIZE_ADDRESS__)
// called by the sanitizer before its report, which knows nothing of kernels
extern "C" __attribute__((weak)) void __asan_on_error() {
    fprintf(stderr, "%s: simt: %sinvalid memory access, reported below\n", program_invocation_short_name, simt_where());
}
#endif

// ---- waiting ----

SIMT_TRUSTED static inline SimtThread& simt_self() { return simt_block.threads[simt_block.current]; }

SIMT_TRUSTED static inline void simt_wait_(SimtThread& t, SimtState state, const char* what, void* part, const char* file, int line) {
    t.state = state;
    t.waits_for = what;
    t.part = part;
    t.file = file;
    t.line = line;
}

// all threads that have not returned are at one barrier
static inline void simt_release_block_(SimtComplete complete) {
    SimtBlock& b = simt_block;
    if (complete) {
        void* parts[SIMT_MAX_THREADS];
        for (int i = 0; i < b.n_threads; i++) { parts[i] = b.threads[i].state == SIMT_AT_BARRIER ? b.threads[i].part : NULL; }
        complete(parts, b.n_threads);
    }
    for (int i = 0; i < b.n_threads; i++) {
        if (b.threads[i].state == SIMT_AT_BARRIER) { b.threads[i].state = SIMT_READY; }
    }
    b.n_at_barrier = 0;
    b.released = SIMT_AT_BARRIER;
}

struct SimtVote {
    int predicate, any, all, count;
};
static inline void simt_complete_vote_(void** parts, int n) {
    int count = 0, of = 0;
    for (int i = 0; i < n; i++) {
        if (parts[i]) { of++; count += ((SimtVote*)parts[i])->predicate != 0; }
    }
    for (int i = 0; i < n; i++) {
        if (parts[i]) {
            SimtVote* v = (SimtVote*)parts[i];
            v->any = count > 0;
            v->all = count == of;
            v->count = count;
        }
    }
}

// a barrier of the block that also counts predicates
static inline SimtVote simt_barrier(const char* what, int predicate, const char* file, int line) {
    SimtBlock& b = simt_block;
    if (b.current < 0) { simt_fail("%s at %s:%d: called by no kernel", what, file, line); }
    SimtThread& t = simt_self();
    SimtVote vote = {predicate, 0, 0, 0};
    if (b.n_at_barrier == 0) { b.first_at_barrier = b.current; }
    const SimtThread& other = b.threads[b.first_at_barrier];
    if (b.n_at_barrier > 0 && (other.line != line || strcmp(other.file, file) != 0)) {
        simt_fail("divergent barrier: this thread is at %s:%d (%s), thread (%u,%u,%u) at %s:%d (%s)", file, line, what,
                  other.index.x, other.index.y, other.index.z, other.file, other.line, other.waits_for);
    }
    simt_wait_(t, SIMT_AT_BARRIER, what, &vote, file, line);
    b.n_at_barrier++;
    if (b.n_at_barrier == b.n_live) { simt_release_block_(simt_complete_vote_); }
    fiber_yield(&t.fiber);
    return vote;
}

// all lanes of the mask wait: at the same place for the same mask?
SIMT_TRUSTED static inline int simt_lanes_agree_(SimtThread* warp, int lane) {
    const SimtThread& t = warp[lane];
    for (int i = 0; i < SIMT_WARP; i++) {
        if (!(t.mask >> i & 1)) { continue; }
        const SimtThread& other = warp[i];
        if (other.mask != t.mask) { return 0; }  // it waits for fewer lanes first
        if (other.line != t.line || other.waits_for != t.waits_for || (other.file != t.file && strcmp(other.file, t.file) != 0)) {
            simt_fail("divergent warp: lane %d is at %s:%d (%s), lane %d of its mask %08x at %s:%d (%s)", lane, t.file, t.line,
                      t.waits_for, i, t.mask, other.file, other.line, other.waits_for);
        }
    }
    return 1;
}

// A collective of the lanes in mask: each calls it at the same place with the same mask.
SIMT_TRUSTED static inline void simt_collective(const char* what, unsigned mask, void* part, SimtComplete complete, const char* file, int line) {
    SimtBlock& b = simt_block;
    if (b.current < 0) { simt_fail("%s at %s:%d: called by no kernel", what, file, line); }
    SimtThread& t = simt_self();
    int lane = b.current % SIMT_WARP;
    SimtThread* warp = &b.threads[b.current - lane];
    SimtLanes& lanes = b.lanes[b.current / SIMT_WARP];
    if (!(mask >> lane & 1)) { simt_fail("%s at %s:%d: lane %d is not in its own mask %08x", what, file, line, lane, mask); }
    if (mask & ~lanes.exist) {
        simt_fail("%s at %s:%d: lane %d of mask %08x does not exist: the block has %d threads", what, file, line,
                  __builtin_ctz(mask & ~lanes.exist), mask, b.n_threads);
    }
    if (mask & lanes.returned) {
        simt_fail("%s at %s:%d: lane %d of mask %08x has returned", what, file, line, __builtin_ctz(mask & lanes.returned), mask);
    }
    simt_wait_(t, SIMT_AT_WARP, what, part, file, line);
    t.mask = mask;
    lanes.wait |= 1u << lane;
    if ((mask & lanes.wait) == mask && simt_lanes_agree_(warp, lane)) {
        void* parts[SIMT_WARP];
        for (int i = 0; i < SIMT_WARP; i++) {
            parts[i] = mask >> i & 1 ? warp[i].part : NULL;
            if (parts[i]) { warp[i].state = SIMT_READY; }
        }
        if (complete) { complete(parts, SIMT_WARP); }
        lanes.wait &= ~mask;
        b.released = SIMT_AT_WARP;
    }
    fiber_yield(&t.fiber);
}

// ---- shared memory ----

// what shared memory holds before anyone writes it: another byte in every order
static inline int simt_garbage() {
    static const int bytes[4] = {0xff, 0x7f, 0xfe, 0x55};
    return bytes[simt_block.order % 4];
}

// one array per block and declaration, from the heap, so that the sanitizer sees what lies beyond; the key is a variable beside it
template <typename T>
static inline T& simt_shared(const void* key, const char* name) {
    SimtBlock& b = simt_block;
    for (SimtShared& s : b.shared) {
        if (s.key == key) { return *(T*)s.memory; }
    }
    SimtShared s = {key, name, NULL, sizeof(T)};
    size_t n_bytes = b.dynamic_shared_bytes;
    for (SimtShared& other : b.shared) { n_bytes += other.n_bytes; }
    size_t n_static = n_bytes - b.dynamic_shared_bytes + sizeof(T);
    if (n_static > SIMT_STATIC_SHARED) { simt_fail("%s: %zu bytes of __shared__ arrays, at most %d fit", name, n_static, SIMT_STATIC_SHARED); }
    if (n_bytes + sizeof(T) > SIMT_MAX_SHARED) { simt_fail("%s: %zu bytes of shared memory, at most %d fit", name, n_bytes + sizeof(T), SIMT_MAX_SHARED); }
    if (posix_memalign((void**)&s.memory, 128, sizeof(T)) != 0) { simt_fail("%s: no memory", name); }
    memset(s.memory, simt_garbage(), sizeof(T));
    b.shared.push_back(s);
    return *(T*)s.memory;
}

template <typename T>
static inline T* simt_dynamic_shared() { return (T*)simt_block.dynamic_shared; }

static inline void simt_fill_shared_() {
    SimtBlock& b = simt_block;
    for (SimtShared& s : b.shared) { memset(s.memory, simt_garbage(), s.n_bytes); }
    if (b.dynamic_shared) { memset(b.dynamic_shared, simt_garbage(), b.dynamic_shared_bytes); }
}

// ---- one block ----

static inline void simt_thread_main_() {
    SimtBlock& b = simt_block;
    b.body(b.arguments);
    SimtThread& t = simt_self();
    if (!t.copies.empty()) { simt_fail("returned with %zu cp.async that it never waited for", t.copies.size()); }
    int lane = b.current % SIMT_WARP;
    SimtLanes& lanes = b.lanes[b.current / SIMT_WARP];
    for (unsigned waiting = lanes.wait; waiting; waiting &= waiting - 1) {
        const SimtThread& other = b.threads[b.current - lane + __builtin_ctz(waiting)];
        if (other.mask >> lane & 1) {
            simt_fail("lane %d has returned, but lane %d waits for it at %s:%d (%s, mask %08x)", lane, __builtin_ctz(waiting),
                      other.file, other.line, other.waits_for, other.mask);
        }
    }
    lanes.returned |= 1u << lane;
    t.state = SIMT_EXITED;
    b.n_live--;  // a barrier waits only for threads that have not returned (since compute capability 7.0)
    if (b.n_live > 0 && b.n_at_barrier == b.n_live) { simt_release_block_(simt_complete_vote_); }
}

// everyone waits and nobody can be released: say who waits where
static inline void simt_deadlock_() {
    SimtBlock& b = simt_block;
    char text[2048] = "";
    for (int i = 0; i < b.n_threads;) {
        SimtThread& t = b.threads[i];
        int end = i + 1;
        while (end < b.n_threads && b.threads[end].state == t.state && b.threads[end].line == t.line) { end++; }
        size_t used = strlen(text);
        if (t.state == SIMT_EXITED) {
            snprintf(text + used, sizeof text - used, "; threads %d..%d returned", i, end - 1);
        } else {
            snprintf(text + used, sizeof text - used, "; threads %d..%d wait at %s:%d (%s)", i, end - 1, t.file, t.line, t.waits_for);
        }
        i = end;
    }
    b.current = -1;
    simt_fail("deadlock%s", text);
}

// runs the ready thread that is first in the order until none is left
SIMT_TRUSTED static inline void simt_run_block_(dim3 block) {
    SimtBlock& b = simt_block;
    for (int i = 0; i < b.n_threads; i++) {
        SimtThread& t = b.threads[i];
        t.state = SIMT_READY;
        t.line = 0;
        t.n_groups = 0;
        t.index = uint3{i % block.x, i / block.x % block.y, i / block.x / block.y};
        fiber_start(&t.fiber, simt_thread_main_);
    }
    for (int w = 0; w * SIMT_WARP < b.n_threads; w++) {
        int n_lanes = b.n_threads - w * SIMT_WARP;
        b.lanes[w] = SimtLanes{n_lanes < SIMT_WARP ? (1u << n_lanes) - 1 : 0xffffffff, 0, 0};
    }
    b.n_live = b.n_threads;
    b.n_at_barrier = 0;
    simt_fill_shared_();
    for (int turn = 0; b.n_live > 0;) {
        while (turn < b.n_threads && b.threads[b.turns[turn]].state != SIMT_READY) { turn++; }
        if (turn == b.n_threads) { simt_deadlock_(); }
        b.current = b.turns[turn];
        b.released = 0;
        threadIdx = b.threads[b.current].index;
        fiber_resume(&b.threads[b.current].fiber);
        // those released may come earlier in the order: up to 31 turns for the lanes of a warp
        if (b.released) { turn = b.released == SIMT_AT_WARP && turn > SIMT_WARP - 1 ? turn - (SIMT_WARP - 1) : 0; }
    }
    b.current = -1;
}

// ---- one launch ----

static inline uint64_t simt_hash_(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
    return x ^ x >> 31;
}

// order 0 ascends, order 1 descends, the others are shuffled
static inline void simt_permute_(int* list, int n, int order, uint64_t key) {
    for (int i = 0; i < n; i++) { list[i] = order == 1 ? n - 1 - i : i; }
    for (int i = n - 1; order > 1 && i > 0; i--) {
        int j = (int)(simt_hash_(key + (uint64_t)order * 1000003 + (uint64_t)i) % (uint64_t)(i + 1)), swap = list[i];
        list[i] = list[j];
        list[j] = swap;
    }
}

static inline void simt_order_threads_(int order) {
    SimtBlock& b = simt_block;
    int n_warps = (b.n_threads + SIMT_WARP - 1) / SIMT_WARP, n = 0;
    int warps[SIMT_WARP], lanes[SIMT_WARP];
    simt_permute_(warps, n_warps, order, 0);
    for (int w = 0; w < n_warps; w++) {
        simt_permute_(lanes, SIMT_WARP, order, (uint64_t)warps[w] + 1);
        for (int l = 0; l < SIMT_WARP; l++) {
            int thread = warps[w] * SIMT_WARP + lanes[l];
            if (thread < b.n_threads) { b.turns[n++] = thread; }
        }
    }
}

static inline void simt_run_grid_(dim3 grid, dim3 block, int order) {
    SimtBlock& b = simt_block;
    b.order = order;
    simt_order_threads_(order);
    int n_blocks = (int)(grid.x * grid.y * grid.z);
    std::vector<int> blocks((size_t)n_blocks);
    simt_permute_(blocks.data(), n_blocks, order, 99);
    for (int i : blocks) {
        blockIdx = uint3{(unsigned)i % grid.x, (unsigned)i / grid.x % grid.y, (unsigned)i / grid.x / grid.y};
        simt_run_block_(block);
    }
}

// ---- the race check ----

static inline int simt_orders() {
    const char* text = getenv("SIMT_ORDERS");
    int n = text ? atoi(text) : 2;
    return n < 1 ? 1 : n;
}

// ends the program unless memory is as after the first run
static inline void simt_compare_(dim3 grid, dim3 block, int order) {
    const char* first = NULL;
    char *start = NULL, *at = simt_difference(&first);
    if (!at) { return; }
    SimtAllocation* a = simt_find(at, &start);
    size_t byte = (size_t)(at - start), in_word = byte % 4, n = a->n_bytes - byte + in_word < 4 ? a->n_bytes - byte + in_word : 4;
    uint32_t was = 0, is = 0;
    memcpy(&was, first - in_word, n);
    memcpy(&is, at - in_word, n);
    const char* kernel = simt_block.kernel;
    simt_block.kernel = NULL;
    float was_float, is_float;
    memcpy(&was_float, &was, sizeof was);
    memcpy(&is_float, &is, sizeof is);
    simt_fail("race: kernel %s<<<(%u,%u,%u), (%u,%u,%u)>>> leaves other bytes when its threads run in another order (or it reads "
              "shared memory that nobody wrote): allocation %d (%zu bytes, %s:%d), first at byte %zu: %08x (%g) in order 0, "
              "%08x (%g) in order %d", kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, a->number, a->n_bytes, a->file,
              a->line, byte - in_word, was, (double)was_float, is, (double)is_float, order);
}

static inline void simt_run_orders_(dim3 grid, dim3 block) {
    int n_orders = simt_orders();
    if (n_orders == 1) { simt_run_grid_(grid, block, 0); return; }
    simt_watch();
    for (int order = 0; order < n_orders; order++) {
        if (order > 0) { simt_rewind(); }
        simt_run_grid_(grid, block, order);
        if (order == 0) { simt_keep_first(); } else { simt_compare_(grid, block, order); }
    }
    simt_unwatch();
}

// ---- what `kernel<<<...>>>(...)` becomes ----

inline int simt_last_error;  // cudaError_t of the last call, until cudaGetLastError takes it
inline std::map<std::string, int>& simt_shared_limits = *new std::map<std::string, int>();  // cudaFuncSetAttribute, by kernel

// what the driver refuses; the numbers are cudaErrorInvalidConfiguration and cudaErrorInvalidValue
static inline int simt_launch_error_(const char* kernel, dim3 grid, dim3 block, size_t n_shared) {
    if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) { return 9; }
    if (block.x < 1 || block.y < 1 || block.z < 1 || block.z > 64) { return 9; }
    if ((uint64_t)block.x * block.y * block.z > SIMT_MAX_THREADS) { return 9; }
    auto limit = simt_shared_limits.find(kernel);
    size_t most = limit == simt_shared_limits.end() ? (size_t)SIMT_STATIC_SHARED : (size_t)limit->second;
    return n_shared > most ? 1 : 0;
}

template <typename Body, typename... Arguments>
static inline void simt_launch(const char* kernel, dim3 grid, dim3 block, size_t n_shared, void* stream, Body body,
                               Arguments... arguments) {
    (void)stream;  // streams run at once, in the order of the calls
    int error = simt_launch_error_(kernel, grid, block, n_shared);
    if (error) { simt_last_error = error; return; }
    auto call = [&]() { body(arguments...); };
    SimtAccess access;
    SimtBlock& b = simt_block;
    b.kernel = kernel;
    b.body = [](void* f) { (*(decltype(call)*)f)(); };
    b.arguments = &call;
    b.n_threads = (int)(block.x * block.y * block.z);
    b.current = -1;
    b.dynamic_shared_bytes = n_shared;
    if (n_shared && posix_memalign((void**)&b.dynamic_shared, 128, n_shared) != 0) { simt_fail("no memory"); }
    blockDim = block;
    gridDim = grid;
    simt_run_orders_(grid, block);
    for (SimtShared& s : b.shared) { free(s.memory); }
    b.shared.clear();
    free(b.dynamic_shared);
    b.dynamic_shared = NULL;
    b.kernel = NULL;
}
#endif  // SIMT_LAUNCH_H
