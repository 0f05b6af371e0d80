/*
Which part of a tensor an arena holds, and where: some hold what learns, or what belongs to a rank (data_parallel.h).
*/
#ifndef LLMC_PART_H
#define LLMC_PART_H
#include "../core/device.h"  // ceil_div
#include "../core/tensor.h"  // Tensor

typedef struct {
    const Tensor* tensor;
    size_t first, n;  // its elements first .. first + n - 1
    size_t at;        // of the arena: where the first of them lies
} Part;

static inline Part part_whole(const Tensor* t) {
    Part part = {t, 0, tensor_elements(t), t->offset};
    return part;
}

// the elements of it that lie in begin .. end - 1; n is 0 when there are none
static inline Part part_within(Part part, size_t begin, size_t end) {
    const size_t from = part.first > begin ? part.first : begin, last = part.first + part.n,
                 to = last < end ? last : end;
    Part out = {part.tensor, from, from < to ? to - from : 0, part.at + (from - part.first)};
    return out;
}

// element `first` of the tensor, which the part holds
static inline size_t part_at(Part part, size_t first) { return part.at + (first - part.first); }

// let n parts follow each other in an arena, at multiples of 64 bytes; its elements come back
static inline size_t parts_pack(Part* parts, int n) {
    size_t at = 0;
    for (int i = 0; i < n; i++) {
        parts[i].at = at;
        at += (size_t)ceil_div((int64_t)parts[i].n, 16) * 16;
    }
    return at;
}
#endif  // LLMC_PART_H
