/*
What ranks that have a matrix together (--tp, rank_group.h) exchange, of activations (N, L) and of the matrix itself.
Every number of a product is computed by one rank, as one chain over all that it sums over: nothing is added across
ranks, so the bits are those of a rank that has the whole matrix.
    tp_gather, tp_gather_floats   each rank has some columns of (N, L): all get all
    tp_gather_rows  each rank has some of the rows: all get all, where they lie
    tp_take         those of this rank, of all columns; tp_spread: to their places among those of all
    tp_to_columns   each rank has some rows of a matrix (OC, C), all their columns: it gets its columns of all rows
    tp_to_rows      and the other way
    TpRoom, tp_room, tp_room_elements   scratch of a product with a matrix (OC, C), whole sizes, for N positions
Columns of (N, L), and rows of a matrix, in sections: of each a rank has one part of `size`, in the order of places, as
of the rows of gate and of up. All sizes are whole, those of all ranks together; the sections are equal.
A matrix (OC, C) whose rows are split, as those of Q, K, V, gate and up: forward is the rank's own, from (N, C) to its
outputs. Back the gradient of the inputs sums over all outputs: these are gathered, the matrix is turned, each rank
computes its columns of the gradient, and they are gathered.
A matrix whose columns are split, as those of O and down: forward sums over all columns: the inputs are gathered, the
matrix is turned, each rank computes its outputs, and they are gathered. Back everything is the rank's own.
Cost:   a rank sends (size - 1) / size of N L floatX for a gather and of OC C / size for a turn.
*/
#ifndef LLMC_TENSOR_PARALLEL_H
#define LLMC_TENSOR_PARALLEL_H
#include "../core/floatx.h"  // floatX
#include "rank_group.h"      // RankGroup, rank_group_exchange

typedef struct {
    floatX *weight;   // (OC C / size), at the same place whatever N
    floatX *pack;     // the same, on its way
    floatX *whole;    // (N, max(C, OC))
    floatX *part;     // (N, max(C, OC) / size)
    floatX *landing;  // what comes from the others
} TpRoom;

static inline size_t tp_larger(size_t a, size_t b) { return a > b ? a : b; }

static inline size_t tp_room_elements(int N, int C, int OC, int size) {
    const size_t whole = (size_t)N * (size_t)(C > OC ? C : OC), weight = (size_t)OC * (size_t)C / (size_t)size;
    return 2 * weight + whole + whole / (size_t)size + tp_larger(weight, whole) + 5 * 16;
}

static inline TpRoom tp_room(floatX* room, int N, int C, int OC, int size) {
    const size_t whole = (size_t)N * (size_t)(C > OC ? C : OC), weight = (size_t)OC * (size_t)C / (size_t)size;
    const size_t n[4] = {weight, weight, whole, whole / (size_t)size};
    floatX* at[5];
    for (int i = 0; i < 5; i++) {
        at[i] = room;
        room += i < 4 ? (n[i] + 15) / 16 * 16 : 0;
    }
    const TpRoom r = {at[0], at[1], at[2], at[3], at[4]};
    return r;
}

// n strips of `width` elements
static inline void tp_strips_(floatX* to, int to_row, const floatX* from, int from_row, int width, int n,
                              const Device* dev) {
    device_copy_strips(to, sizeof(floatX) * (size_t)to_row, from, sizeof(floatX) * (size_t)from_row,
                       sizeof(floatX) * (size_t)width, n, dev);
}

// L: bytes of a whole row
static inline void tp_gather_bytes_(void* whole, const void* part, void* landing, int N, size_t L, size_t sections,
                                    const RankGroup* x, const Device* dev) {
    const size_t each = L / (size_t)x->size, width = each / sections, n = (size_t)N * each;
    rank_group_exchange(landing, part, 0, n, x, dev);
    for (size_t p = 0; p < (size_t)x->size; p++) {
        const char* from = p == (size_t)x->place ? (const char*)part : (const char*)landing + n * p;
        for (size_t s = 0; s < sections; s++) {
            device_copy_strips((char*)whole + s * (L / sections) + p * width, L, from + s * width, each, width, N, dev);
        }
    }
}

// whole (N, L), part (N, L / size); landing (size, N, L / size)
static inline void tp_gather(floatX* whole, const floatX* part, floatX* landing, int N, int L, int sections,
                             const RankGroup* x, const Device* dev) {
    tp_gather_bytes_(whole, part, landing, N, sizeof(floatX) * (size_t)L, (size_t)sections, x, dev);
}

// the same of statistics
static inline void tp_gather_floats(float* whole, const float* part, float* landing, int N, int L, const RankGroup* x,
                                    const Device* dev) {
    tp_gather_bytes_(whole, part, landing, N, sizeof(float) * (size_t)L, 1, x, dev);
}

// rows (N, width bytes), of which place p has comm_share(N, p, size) and those up to that of the next
static inline void tp_gather_rows(void* rows, int N, size_t width, const RankGroup* x, const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    char* at = (char*)rows;
    const size_t first = width * (size_t)comm_share(N, x->place, x->size);
    const size_t n = width * (size_t)comm_share(N, x->place + 1, x->size) - first;
    for (int p = 0; p < x->size; p++) {
        const size_t begin = width * (size_t)comm_share(N, p, x->size);
        const size_t n_recv = width * (size_t)comm_share(N, p + 1, x->size) - begin;
        const CommPiece piece = {at + first, at + begin, p == x->place ? 0 : n, p == x->place ? 0 : n_recv};
        pieces[p] = piece;
    }
    comm_wait_device(x->group, comm_exchange_device(x->group, pieces, dev, HERE), dev);
}

static inline void tp_take(floatX* part, const floatX* whole, int N, int L, int sections, const RankGroup* x,
                           const Device* dev) {
    const int each = L / x->size, width = each / sections;
    for (int s = 0; s < sections; s++) {
        tp_strips_(part + s * width, each, whole + s * (L / sections) + x->place * width, L, width, N, dev);
    }
}

// the way back: whole (N, L) with columns of this rank at their place, 0 in those of the others
static inline void tp_spread(floatX* whole, const floatX* part, int N, int L, const RankGroup* x, const Device* dev) {
    const int each = L / x->size;
    device_zero(whole, sizeof(floatX) * (size_t)N * (size_t)L, dev);
    tp_strips_(whole + x->place * each, L, part, each, each, N, dev);
}

// room->weight (OC, C / size) from rows (OC / size, C)
static inline void tp_to_columns(const TpRoom* room, const floatX* rows, int OC, int C, int sections,
                                 const RankGroup* x, const Device* dev) {
    const int c = C / x->size, n_rows = OC / x->size, width = n_rows / sections;
    const size_t n = (size_t)n_rows * (size_t)c;
    for (int p = 0; p < x->size; p++) {
        tp_strips_((p == x->place ? room->landing : room->pack) + n * (size_t)p, c, rows + (size_t)p * c, C, c, n_rows,
                   dev);
    }
    rank_group_exchange(room->landing, room->pack, sizeof(floatX) * n, sizeof(floatX) * n, x, dev);
    for (int p = 0; p < x->size; p++) {
        for (int s = 0; s < sections; s++) {
            device_copy(room->weight + (size_t)(s * (OC / sections) + p * width) * (size_t)c,
                        room->landing + n * (size_t)p + (size_t)(s * width) * (size_t)c,
                        sizeof(floatX) * (size_t)width * (size_t)c, dev);
        }
    }
}

// room->weight (OC / size, C) from columns (OC, C / size)
static inline void tp_to_rows(const TpRoom* room, const floatX* columns, int OC, int C, const RankGroup* x,
                              const Device* dev) {
    const int c = C / x->size, n_rows = OC / x->size;
    const size_t n = (size_t)n_rows * (size_t)c;
    rank_group_exchange(room->landing, columns, sizeof(floatX) * n, sizeof(floatX) * n, x, dev);
    for (int p = 0; p < x->size; p++) {
        tp_strips_(room->weight + (size_t)p * c, C, (p == x->place ? columns : room->landing) + n * (size_t)p, c, c,
                   n_rows, dev);
    }
}
#endif  // LLMC_TENSOR_PARALLEL_H
