/*
How one block runs: its threads are fibers (simt_fiber.h), and one of them runs at a time, until it must wait: at a barrier of the
block, or at a collective of its warp (shuffle, vote, mma). The thread that arrives last does the work of all that waited, and
they become ready. Then the ready thread that comes FIRST IN THE ORDER runs; the launch says which order (simt_launch.h).

Here lie the rules whose breach ends the program with one line:
    all threads that have not returned meet at the same barrier
    all lanes of a mask exist, have not returned, and come to the same collective with the same mask
    there is always someone who can go on
*/
#ifndef SIMT_BLOCK_H
#define SIMT_BLOCK_H
#include "simt_memory.h"

enum { SIMT_WARP = 32, SIMT_MAX_THREADS = 1024, SIMT_STATIC_SHARED = 48 << 10, SIMT_MAX_SHARED = 227 << 10 };
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
static constexpr int warpSize = SIMT_WARP;

typedef enum { SIMT_READY, SIMT_AT_BARRIER, SIMT_AT_WARP, SIMT_EXITED } SimtState;

// A collective: every lane that waits hands over a pointer to its own part of the work, which lies on its own stack.
// complete(parts, 32) is called once, by the last to arrive: parts[i] belongs to lane i, NULL if that takes no part.
typedef void (*SimtComplete)(void** parts, int n);

// an asynchronous copy under way (simt_mma.h)
struct SimtCopy {
    char* to;
    const char* from;
    int n_bytes, n_valid, group;
};

// a product of a warpgroup under way (simt_wgmma.h)
struct SimtWgmma {
    float* sums;
    int n;                   // 4 * n of them are this lane's
    float* value;            // what they will be; one for all products of the same sums
    const unsigned* a;       // registers of a, NULL: a_matrix
    unsigned a_at_issue[4];
    uint64_t a_matrix, b_matrix;
    int a_transposed, b_transposed, add, group;
    const char* file;
    int line;
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
    std::vector<SimtCopy> unfenced;     // that arrived since this thread's last fence.proxy.async
    std::vector<SimtWgmma> products;  // of its warpgroup, not waited for
    int n_product_groups, n_products;   // committed, issued so far
    int wgmma_fenced, wait_until;       // no wait since the last fence; the group that a wait leaves under way
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
    int opted_in;        // cudaFuncSetAttribute allowed this kernel more than 48 KiB
};
inline SimtBlock& simt_block = *new SimtBlock();  // the one that runs

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

// what a barrier of the block answers
struct SimtVote {
    int predicate, any, all, count;
};

// all threads that have not returned are at one barrier: count their predicates and let them go on
SIMT_TRUSTED static inline void simt_release_block_() {
    SimtBlock& b = simt_block;
    int count = 0;
    for (int i = 0; i < b.n_threads; i++) {
        SimtThread& t = b.threads[i];
        if (t.state == SIMT_AT_BARRIER) { count += ((SimtVote*)t.part)->predicate != 0; }
    }
    for (int i = 0; i < b.n_threads; i++) {
        SimtThread& t = b.threads[i];
        if (t.state != SIMT_AT_BARRIER) { continue; }
        SimtVote* v = (SimtVote*)t.part;
        v->any = count > 0;
        v->all = count == b.n_live;
        v->count = count;
        t.state = SIMT_READY;
    }
    b.n_at_barrier = 0;
    b.released = SIMT_AT_BARRIER;
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
    if (b.n_at_barrier == b.n_live) { simt_release_block_(); }
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
    size_t n_bytes = sizeof(T), most = b.opted_in ? SIMT_MAX_SHARED : SIMT_STATIC_SHARED;
    for (SimtShared& other : b.shared) { n_bytes += other.n_bytes; }
    if (n_bytes > SIMT_STATIC_SHARED) { simt_fail("%s: %zu bytes of __shared__ arrays, at most %d fit", name, n_bytes, SIMT_STATIC_SHARED); }
    if (n_bytes + b.dynamic_shared_bytes > most) {
        simt_fail("%s: %zu bytes of shared memory, static and dynamic, at most %zu fit%s", name, n_bytes + b.dynamic_shared_bytes, most,
                  b.opted_in ? "" : " without cudaFuncSetAttribute");
    }
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
    if (!t.products.empty()) { simt_fail("returned with %zu wgmma that it never waited for", t.products.size()); }
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
    if (b.n_live > 0 && b.n_at_barrier == b.n_live) { simt_release_block_(); }
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
        t.n_groups = t.n_product_groups = t.n_products = t.wgmma_fenced = 0;
        t.unfenced.clear();
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
    for (int i = 0; i < b.n_threads; i++) {
        if (b.threads[i].n_products == b.threads[i / 128 * 128].n_products) { continue; }
        simt_fail("warp %d issued %d wgmma, warp %d of its warpgroup %d", i / SIMT_WARP, b.threads[i].n_products, i / 128 * 4,
                  b.threads[i / 128 * 128].n_products);
    }
}
#endif  // SIMT_BLOCK_H
