/*
How a kernel is launched: block after block (simt_block.h), in an order that a GPU leaves open. A kernel's result must not depend on
it. So every launch runs under two or more orders from the same memory, and the bytes it leaves in every allocation must be the same
(SIMT_ORDERS=n: how many; 1 switches it off):
    order 0   blocks, warps and lanes ascending; shared memory starts as bytes 0xff (NaN)
    order 1   all of them descending;            shared memory starts as bytes 0x7f (a huge number)
    order n   all of them shuffled by n;         shared memory starts as another byte
Between two barriers any two threads run once in either order: one that reads what the other writes sees it in one run only.
*/
#ifndef SIMT_LAUNCH_H
#define SIMT_LAUNCH_H
#include "simt_block.h"
#include "simt_capture.h"
#include <string>

// ---- orders ----

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

// every block once
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
    if ((uint64_t)grid.x * grid.y * grid.z >> 31) { simt_fail("kernel %s: more blocks than a CPU will ever run", kernel); }
    if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) { return 9; }
    if (block.x < 1 || block.y < 1 || block.z < 1 || block.z > 64) { return 9; }
    if ((uint64_t)block.x * block.y * block.z > SIMT_MAX_THREADS) { return 9; }
    auto limit = simt_shared_limits.find(kernel);
    size_t most = limit == simt_shared_limits.end() ? (size_t)SIMT_STATIC_SHARED : (size_t)limit->second;
    return n_shared > most ? 1 : 0;
}

template <typename Call>
static inline void simt_run_kernel_(const char* kernel, dim3 grid, dim3 block, size_t n_shared, const Call& call) {
    SimtAccess access;
    SimtBlock& b = simt_block;
    b.kernel = kernel;
    b.body = [](void* f) { (*(const Call*)f)(); };
    b.arguments = (void*)&call;
    b.n_threads = (int)(block.x * block.y * block.z);
    b.current = -1;
    b.dynamic_shared_bytes = n_shared;
    b.opted_in = simt_shared_limits.count(kernel) > 0;
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

template <typename Body, typename... Arguments>
static inline void simt_launch(const char* kernel, dim3 grid, dim3 block, size_t n_shared, SimtStream* stream, Body body,
                               Arguments... arguments) {
    int error = simt_launch_error_(kernel, grid, block, n_shared);
    auto call = [=]() { body(arguments...); };  // their values now, whenever a graph runs it
    if (!error) {
        error = simt_submit(stream, kernel, [=](SimtStream*) { simt_run_kernel_(kernel, grid, block, n_shared, call); });
    }
    if (error) { simt_last_error = error; }
}
#endif  // SIMT_LAUNCH_H
