/*
What ranks that have a matrix together (--tp, rank_group.h) exchange, of activations (N, L) and of the matrix itself.
Every number of a product is computed by one rank, as one chain over all that it sums over, or, of a vocabulary, by one
rank after the other as one chain: no sums of ranks are added, so the bits are those of a rank that has the whole
matrix.
    tp_gather, tp_gather_floats   each rank has some columns of (N, L): all get all
    tp_gather_rows  each rank has some of the rows: all get all, where they lie
    tp_scatter_rows each gets its rows from every rank
    tp_chain_steps, tp_chain_piece, tp_chain_pass, tp_chain_end   of a vocabulary, or of heads, of which each rank has
                    some: sums over all of it, each a chain that goes on from rank to rank
    tp_own_rows, tp_chain_sends   of N rows those of its piece; bytes that a rank sends for a chain
    tp_take         those of this rank, of all columns
    tp_to_columns   each rank has some rows of a matrix (OC, C), all their columns: it gets its columns of all rows
    tp_to_rows      and the other way; both of elements of any size, such as bytes of fp8, or scales of blocks
    TpRoom, tp_room, tp_room_elements   scratch of a product with a matrix (OC, C), whole sizes, for N positions
Columns of (N, L), and rows of a matrix, in sections (TpSections): of each a rank has one part of `size`, in the order
of places, as of the rows of gate and of up. All sizes are whole, those of all ranks together. tp_one: a single section.
A matrix (OC, C) whose rows are split, as those of Q, K, V, gate and up: forward is the rank's own, from (N, C) to its
outputs. Back the gradient of the inputs sums over all outputs: these are gathered, the matrix is turned, each rank
computes its columns of the gradient, and they are gathered.
A matrix whose columns are split, as those of O and down: forward sums over all columns: the inputs are gathered, the
matrix is turned, each rank computes its outputs, and they are gathered. Back everything is the rank's own.
A vocabulary is far wider than the channels, so that its logits are not gathered. A sum over it begins on place 0 with
what that has, goes on from place to place, and all get it from the last: still one chain, but no rank does it alone.
Nobody waits for the others' parts: rows are cut in `size` pieces, and at each step every rank has another one.

    step       0    1    2    3    4      of three ranks: which piece a rank adds to; it came from the place before
    place 0    0    1    2    .    .      a step ago. Where there is none the rank may do something else
    place 1    .    0    1    2    .
    place 2    .    .    0    1    2      the last hands piece p to place p; in the end these are gathered

Cost:   a rank sends (size - 1) / size of N L floatX for a gather, and for a turn of what it has of the matrix, as that
        is stored; for a chain twice the former, in 2 size - 1 exchanges.
*/
#ifndef LLMC_TENSOR_PARALLEL_H
#define LLMC_TENSOR_PARALLEL_H
#include "../core/floatx.h"  // floatX
#include "../core/tensor.h"  // SECTIONS_MAX
#include "rank_group.h"      // RankGroup, rank_group_exchange

typedef struct { int n, of[SECTIONS_MAX]; } TpSections;

static inline TpSections tp_one(int L) {
    const TpSections one = {1, {L, 0, 0, 0}};
    return one;
}

static inline int tp_length(const TpSections* s) {
    int L = 0;
    for (int k = 0; k < s->n; k++) { L += s->of[k]; }
    return L;
}

typedef struct {
    floatX *weight;   // of a part of the matrix, turned, as it is stored; at the same place whatever N
    floatX *pack;     // the same, on its way
    floatX *whole;    // (N, max(C, OC))
    floatX *part;     // (N, max(C, OC) / size)
    floatX *landing;  // what comes from the others
} TpRoom;

static inline size_t tp_larger(size_t a, size_t b) { return a > b ? a : b; }

// elements; scales begin at a multiple of 16 bytes
static inline size_t tp_room_weight_(size_t part_bytes) { return (part_bytes + 16) / sizeof(floatX) + 1; }

// part_bytes: of a part of the matrix, with its scales
static inline size_t tp_room_elements(int N, int C, int OC, size_t part_bytes, int size) {
    const size_t whole = (size_t)N * (size_t)(C > OC ? C : OC), weight = tp_room_weight_(part_bytes);
    return 2 * weight + whole + whole / (size_t)size + tp_larger(weight, whole) + 5 * 16;
}

static inline TpRoom tp_room(floatX* room, int N, int C, int OC, size_t part_bytes, int size) {
    const size_t whole = (size_t)N * (size_t)(C > OC ? C : OC), weight = tp_room_weight_(part_bytes);
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

// of elements of so many bytes
static inline void tp_gather_bytes_(void* whole, const void* part, void* landing, int N, TpSections sections,
                                    size_t bytes, const RankGroup* x, const Device* dev) {
    const size_t size = (size_t)x->size, L = bytes * (size_t)tp_length(&sections), each = L / size;
    const size_t n = (size_t)N * each;
    rank_group_exchange(landing, part, 0, n, x, dev);
    for (size_t p = 0; p < size; p++) {
        const char* from = p == (size_t)x->place ? (const char*)part : (const char*)landing + n * p;
        size_t at = 0;
        for (int s = 0; s < sections.n; s++) {
            const size_t section = bytes * (size_t)sections.of[s], width = section / size;
            device_copy_strips((char*)whole + at + p * width, L, from + at / size, each, width, N, dev);
            at += section;
        }
    }
}

// whole (N, L), part (N, L / size); landing (size, N, L / size)
static inline void tp_gather(floatX* whole, const floatX* part, floatX* landing, int N, TpSections sections,
                             const RankGroup* x, const Device* dev) {
    tp_gather_bytes_(whole, part, landing, N, sections, sizeof(floatX), x, dev);
}

// the same of statistics
static inline void tp_gather_floats(float* whole, const float* part, float* landing, int N, int L, const RankGroup* x,
                                    const Device* dev) {
    tp_gather_bytes_(whole, part, landing, N, tp_one(L), sizeof(float), x, dev);
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

typedef struct { size_t at, n_bytes; } TpRows;

// piece p of (N, width bytes)
static inline TpRows tp_rows_(int N, size_t width, int p, const RankGroup* x) {
    const size_t at = width * (size_t)comm_share(N, p, x->size);
    const TpRows rows = {at, width * (size_t)comm_share(N, p + 1, x->size) - at};
    return rows;
}

// landing (size, own rows, width bytes), from rows (N, width bytes) of each
static inline void tp_scatter_rows(void* landing, const void* rows, int N, size_t width, const RankGroup* x,
                                   const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    const size_t n = tp_rows_(N, width, x->place, x).n_bytes;
    for (int p = 0; p < x->size; p++) {
        const TpRows of = tp_rows_(N, width, p, x);
        const CommPiece piece = {(const char*)rows + of.at, (char*)landing + n * (size_t)p, of.n_bytes, n};
        pieces[p] = piece;
    }
    comm_wait_device(x->group, comm_exchange_device(x->group, pieces, dev, HERE), dev);
}

static inline int tp_chain_steps(const RankGroup* x) { return 2 * x->size - 1; }

// of N rows the piece of this rank
static inline double tp_own_rows(int64_t N, const RankGroup* x) {
    return (double)(comm_share(N, x->place + 1, x->size) - comm_share(N, x->place, x->size));
}

// all pieces to the next place, or from the last one to theirs; in the end its own to all but the last
static inline double tp_chain_sends(int64_t N, double width, const RankGroup* x) {
    return ((double)N + (x->size - 2.0) * tp_own_rows(N, x)) * width;
}

// the piece that it is this rank's turn to add to; -1: none
static inline int tp_chain_piece(int step, const RankGroup* x) {
    const int piece = step - x->place;
    return piece >= 0 && piece < x->size ? piece : -1;
}

// behind the work of a step: rows (N, width bytes)
static inline void tp_chain_pass(void* rows, int N, size_t width, int step, const RankGroup* x, const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    const int last = x->size - 1, place = x->place, piece = tp_chain_piece(step, x), next = step + 1 - place;
    const int to = place < last ? place + 1 : piece;
    if (step + 1 == tp_chain_steps(x)) { return; }
    memset(pieces, 0, sizeof(CommPiece) * (size_t)x->size);
    if (piece >= 0 && to != place) {
        const TpRows mine = tp_rows_(N, width, piece, x);
        pieces[to].send = (const char*)rows + mine.at, pieces[to].n_send = mine.n_bytes;
    }
    if (place > 0 && next >= 0 && next < x->size) {
        const TpRows before = tp_rows_(N, width, next, x);
        pieces[place - 1].recv = (char*)rows + before.at, pieces[place - 1].n_recv = before.n_bytes;
    }
    if (place < last && step - last == place) {  // it is whole
        const TpRows own = tp_rows_(N, width, place, x);
        pieces[last].recv = (char*)rows + own.at, pieces[last].n_recv = own.n_bytes;
    }
    comm_wait_device(x->group, comm_exchange_device(x->group, pieces, dev, HERE), dev);
}

// behind the last step: all pieces come to all but to the last place, which has finished them
static inline void tp_chain_end(void* rows, int N, size_t width, const RankGroup* x, const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    if (x->size == 1) { return; }
    const TpRows own = tp_rows_(N, width, x->place, x);
    for (int p = 0; p < x->size; p++) {
        const TpRows other = tp_rows_(N, width, p, x);
        const size_t n_send = p == x->size - 1 ? 0 : own.n_bytes, n_recv = x->place == x->size - 1 ? 0 : other.n_bytes;
        const CommPiece piece = {(char*)rows + own.at, (char*)rows + other.at, p == x->place ? 0 : n_send,
                                 p == x->place ? 0 : n_recv};
        pieces[p] = piece;
    }
    comm_wait_device(x->group, comm_exchange_device(x->group, pieces, dev, HERE), dev);
}

static inline void tp_take(floatX* part, const floatX* whole, int N, TpSections sections, const RankGroup* x,
                           const Device* dev) {
    const int L = tp_length(&sections), size = x->size;
    for (int s = 0, at = 0; s < sections.n; at += sections.of[s++]) {
        const int width = sections.of[s] / size;
        tp_strips_(part + at / size, L / size, whole + at + x->place * width, L, width, N, dev);
    }
}

// columns (OC, width bytes), of this rank's columns, from rows (OC / size, size width bytes), OC in sections
static inline void tp_to_columns(void* columns, const void* rows, const TpRoom* room, TpSections sections, size_t width,
                                 const RankGroup* x, const Device* dev) {
    const int size = x->size, n_rows = tp_length(&sections) / size;
    const size_t n = (size_t)n_rows * width;
    char *landing = (char*)room->landing, *pack = (char*)room->pack;
    for (int p = 0; p < size; p++) {
        device_copy_strips((p == x->place ? landing : pack) + n * (size_t)p, width,
                           (const char*)rows + width * (size_t)p, width * (size_t)size, width, n_rows, dev);
    }
    rank_group_exchange(landing, pack, n, n, x, dev);
    for (int p = 0; p < size; p++) {
        for (int s = 0, at = 0; s < sections.n; at += sections.of[s++]) {
            const int each = sections.of[s] / size;
            device_copy((char*)columns + width * (size_t)(at + p * each),
                        landing + n * (size_t)p + width * (size_t)(at / size), width * (size_t)each, dev);
        }
    }
}

// rows (OC / size, size width bytes) from columns (OC, width bytes)
static inline void tp_to_rows(void* rows, const void* columns, const TpRoom* room, int OC, size_t width,
                              const RankGroup* x, const Device* dev) {
    const int n_rows = OC / x->size;
    const size_t n = (size_t)n_rows * width;
    rank_group_exchange(room->landing, columns, n, n, x, dev);
    for (int p = 0; p < x->size; p++) {
        const char* from = (p == x->place ? (const char*)columns : (const char*)room->landing) + n * (size_t)p;
        device_copy_strips((char*)rows + width * (size_t)p, width * (size_t)x->size, from, width, width, n_rows, dev);
    }
}
#endif  // LLMC_TENSOR_PARALLEL_H
