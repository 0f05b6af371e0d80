/*
Which rows a block of grouped_matmul.h, or of grouped_hopper.h, has: tiles of so many rows of one expert, those of the
first expert first. How many an expert has is in offsets (E+1) on the device: expert e's rows are offsets[e] ..
offsets[e+1]-1, and it may have none.
*/
#ifndef LLMC_GROUPED_TILES_H
#define LLMC_GROUPED_TILES_H
#ifdef __CUDACC__
#include "../core/kernel.h"  // WARP, ALL_LANES, ceil_div

struct GroupedTile {
    int expert, first, n_rows;  // n_rows 0: there are fewer tiles than blocks
};

// at most so many tiles; how many there are, only the device knows
static inline int64_t grouped_most_tiles(int E, int R, int rows) {
    int64_t most = ceil_div(R, rows) + E - 1;
    return most < R ? most : R;
}

// every warp finds it for itself: lanes hold experts, and count the tiles of those before
__device__ inline GroupedTile grouped_find_tile(const int* offsets, int E, int rows, int tile) {
    GroupedTile found = {0, 0, 0};
    int lane = threadIdx.x % WARP;
    for (int e = 0; e < E; e += WARP) {
        int begin = offsets[min(e + lane, E)], end = offsets[min(e + lane + 1, E)], n = (end - begin + rows - 1) / rows;
        int upto = n;  // tiles of this expert and those of the lanes before
        for (int step = 1; step < WARP; step *= 2) {
            int before = __shfl_up_sync(ALL_LANES, upto, step);
            upto += lane >= step ? before : 0;
        }
        unsigned behind = __ballot_sync(ALL_LANES, tile < upto);
        if (behind) {
            int owner = __ffs((int)behind) - 1;
            found.expert = e + owner;
            found.first = __shfl_sync(ALL_LANES, begin + (tile - (upto - n)) * rows, owner);
            found.n_rows = min(rows, __shfl_sync(ALL_LANES, end, owner) - found.first);
            return found;
        }
        tile -= __shfl_sync(ALL_LANES, upto, WARP - 1);
    }
    return found;
}

__device__ inline size_t grouped_at(const int* index, int s) { return index ? (size_t)index[s] : (size_t)s; }
#endif  // __CUDACC__
#endif  // LLMC_GROUPED_TILES_H
