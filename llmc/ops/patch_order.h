/*
Where the patches of an image stand: those of a frame in blocks of merge x merge, the blocks by rows of blocks, in a
block row by row, so that the patches of one token of the text stand together. Frame follows frame.
    patch_place    row and column of patch p of a frame whose rows have w patches
*/
#ifndef LLMC_PATCH_ORDER_H
#define LLMC_PATCH_ORDER_H

static inline void patch_place(int* row, int* column, int p, int w, int merge) {
    const int block = p / (merge * merge), inside = p % (merge * merge), across = w / merge;  // blocks of a row
    *row = block / across * merge + inside / merge;
    *column = block % across * merge + inside % merge;
}
#endif  // LLMC_PATCH_ORDER_H
