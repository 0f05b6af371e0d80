/*
Rows on their way to threads that stay on their channels while their block walks down the rows: backward of layernorm.h
and rmsnorm.h. The next rows of each thread are copied to shared memory (cp.async) while it works on the one before
them. A thread copies only what it reads itself, so it waits for no other.
    block   (T, R): T threads, a multiple of 32, have a row, R rows at a time. C channels, a multiple of 8, at most
            8 PACKS T
    pack    8 channels. Pack k of thread x of a row begins at channel row_ring_channel(k)
    stage   one row of each thread, of ARRAYS arrays; there are ROW_RING_STAGES
*/
#ifndef LLMC_ROW_RING_H
#define LLMC_ROW_RING_H
#ifdef __CUDACC__
#include "../core/device.h"  // ceil_div
#include "../core/kernel.h"  // Pack, WARP, lane_sum, pack_width, store_floats
#include "../core/mma.h"     // cp_async_16_zfill

enum { ROW_RING_W = 8 };          // channels of a pack
enum { ROW_RING_THREADS = 256 };  // of a block, of which a multiprocessor has one
enum { ROW_RING_STAGES = 3 };     // rows of a thread in shared memory: this one, and those to come

__device__ inline int row_ring_channel(int k) { return (int)(k * blockDim.x + threadIdx.x) * ROW_RING_W; }

// The ring of an op: PACKS packs of a row in a thread, ARRAYS arrays of X
template <int PACKS, int ARRAYS, typename X>
struct RowRing {
    // of the packs that a stage has of one array, the first of this thread; the next is blockDim.x * blockDim.y further
    __device__ static inline Pack<X, ROW_RING_W>* kept(int stage, int array) {
        extern __shared__ float4 row_ring_room[];
        const int threads = blockDim.x * blockDim.y, first = (stage * ARRAYS + array) * PACKS * threads;
        return reinterpret_cast<Pack<X, ROW_RING_W>*>(row_ring_room) + first + threadIdx.y * blockDim.x + threadIdx.x;
    }

    // row n of an array sets out for its stage; beyond N and C zeros do
    __device__ static inline void fetch(int stage, int array, const X* from, int n, int N, int C) {
        Pack<X, ROW_RING_W>* to = kept(stage, array);
        for (int k = 0; k < PACKS; k++, to += blockDim.x * blockDim.y) {
            const int c = row_ring_channel(k), exists = n < N && c < C;
            const X* pack = exists ? from + (size_t)n * C + c : from;
            for (int i = 0; i < ROW_RING_W; i += pack_width<X>()) {
                cp_async_16_zfill(&to->x[i], pack + i, 16 * exists);
            }
        }
    }

    // ---- sizes of a launch ----

    // bytes of shared memory of a thread
    static inline int thread_bytes() { return ROW_RING_STAGES * ARRAYS * PACKS * ROW_RING_W * (int)sizeof(X); }

    // T: threads of a row
    static inline int threads(int C) { return (int)ceil_div(ceil_div(C, PACKS * ROW_RING_W), WARP) * WARP; }

    // R: rows that a block works on at a time; 0: C is no multiple of 8, or more than threads can have. 1 KiB: for the
    // sums of warps
    static inline int rows(int C, const Device* dev) {
        if (C % ROW_RING_W != 0) { return 0; }
        const int room = (dev->most_shared - 1024) / thread_bytes();
        return (room < ROW_RING_THREADS ? room : (int)ROW_RING_THREADS) / threads(C);
    }
};

// what the warps of a block have of N sums over rows
template <int N>
using RowRingSums = Pack<float, N>[ROW_RING_THREADS / WARP];

// sums over a row, the same in all its threads: lanes along a tree, then warps in order. of_warps must not be written
// again before another barrier
template <int N>
__device__ inline void row_ring_add_threads(Pack<float, N>& x, RowRingSums<N>& of_warps) {
    const int n_warps = blockDim.x / WARP, first = threadIdx.y * n_warps;
    for (int i = 0; i < N; i++) { x.x[i] = lane_sum(x.x[i]); }
    if (n_warps == 1) { return; }
    if (threadIdx.x % WARP == 0) { of_warps[first + threadIdx.x / WARP] = x; }
    x = {};
    __syncthreads();
    for (int w = 0; w < n_warps; w++) {
        const Pack<float, N> sum = of_warps[first + w];
        for (int i = 0; i < N; i++) { x.x[i] += sum.x[i]; }
    }
}

// parts (KINDS, C): the sums of each thread's rows become those of all rows of the block, in order. The ring is empty
// and has room
template <int KINDS, int PACKS>
__device__ inline void row_ring_add_rows(float* parts, const float (&sums)[KINDS][PACKS][ROW_RING_W], int C) {
    extern __shared__ float4 row_ring_room[];
    const int W = ROW_RING_W, R = blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    float* kept = reinterpret_cast<float*>(row_ring_room);  // (R, KINDS, C)
    __syncthreads();
    for (int kind = 0; kind < KINDS; kind++) {
        for (int k = 0; k < PACKS; k++) {
            const int c = row_ring_channel(k);
            Pack<float, W> sum;
            for (int i = 0; i < W; i++) { sum.x[i] = sums[kind][k][i]; }
            if (c < C) { store_floats(kept + ((size_t)threadIdx.y * KINDS + kind) * C + c, sum); }
        }
    }
    __syncthreads();
    for (int j = thread; j < KINDS * C; j += blockDim.x * R) {
        float sum = kept[j];
        for (int r = 1; r < R; r++) { sum += kept[(size_t)r * KINDS * C + j]; }
        parts[j] = sum;
    }
}
#endif  // __CUDACC__
#endif  // LLMC_ROW_RING_H
