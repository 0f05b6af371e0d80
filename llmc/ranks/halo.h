/*
--cp of a model whose positions read a few rows of those before them: keys of a window, tokens of an entry. A rank has
one chunk of each row (context_ranks.h), n positions, and a *halo*, the rows before these, from the rank before it or,
where chunks are shorter, from several.
    Halo          x (B, before + n, C): of each of B rows the halo and then this rank's own
    halo_spread   own (B*n, C) goes to its place in x, and to the ranks behind; of the halo the last `deep` rows come
    halo_collect  and back, of gradients: each rank gets what the ranks behind have for rows of its own, and own becomes
                  the sums; x is used up
    halo_clear    0 where the halo is
    halo_room_elements   scratch, for rows of C elements
    halo_sends    bytes that the first rank sends forward; back it sends none
Order:  halo_collect adds to own rows what comes, in the order of places, each sum rounded to floatX.
*/
#ifndef LLMC_HALO_H
#define LLMC_HALO_H
#include "../core/floatx.h"   // floatX
#include "../ops/residual.h"  // residual_forward
#include "rank_group.h"       // RankGroup, comm_exchange_device

typedef struct {
    const RankGroup* ranks;
    int B, n, before;
    floatX* room;  // halo_room_elements
} Halo;

static inline size_t halo_room_elements(int B, int before, int C) { return 2 * (size_t)B * (size_t)before * (size_t)C; }

// of the `deep` rows before the chunk of place `to`, those that place `from` has: the last of its own
static inline int halo_share_(const Halo* h, int deep, int from, int to) {
    const int64_t left = deep - (int64_t)(to - from - 1) * h->n;
    return from >= to || left <= 0 ? 0 : left < h->n ? (int)left : h->n;
}

// of rows of `width` bytes
static inline double halo_sends(int B, int n, int deep, double width, const RankGroup* x) {
    return (double)B * fmin(deep, (x->size - 1.0) * n) * width;
}

// the share of the halo that place `from` has begins at this row of x
static inline int halo_row_(const Halo* h, int from, int share) {
    return h->before - (h->ranks->place - from - 1) * h->n - share;
}

static inline size_t halo_x_row_(const Halo* h, int C) { return (size_t)(h->before + h->n) * (size_t)C; }

// `rows` rows of each of B, from row `first` of x on, to or from where they lie together
static inline void halo_copy_(const Halo* h, floatX* x, floatX* together, int to_x, int first, int rows, int C,
                              const Device* dev) {
    if (rows == 0) { return; }
    const size_t width = sizeof(floatX) * (size_t)rows * (size_t)C, stride = sizeof(floatX) * halo_x_row_(h, C);
    floatX* at = x + (size_t)first * (size_t)C;
    if (to_x) { device_copy_strips(at, stride, together, width, width, h->B, dev); }
    else { device_copy_strips(together, width, at, stride, width, h->B, dev); }
}

// Rows of x go to other ranks, and as many come as those have for this one: forward the last of its own, which are the
// halos of the ranks behind; back the rows of its halo. pieces: of each rank, what comes lies there then
static inline void halo_exchange_(const Halo* h, CommPiece* pieces, floatX* x, int deep, int is_back, int C,
                                  const Device* dev) {
    const RankGroup* ranks = h->ranks;
    floatX *send = h->room, *recv = h->room + halo_room_elements(h->B, h->before, C) / 2;
    for (int p = 0; p < ranks->size; p++) {
        const int ahead = halo_share_(h, deep, ranks->place, p), behind = halo_share_(h, deep, p, ranks->place);
        const size_t n_send = (size_t)(is_back ? behind : ahead) * (size_t)h->B * (size_t)C;
        const size_t n_recv = (size_t)(is_back ? ahead : behind) * (size_t)h->B * (size_t)C;
        const CommPiece piece = {send, recv, sizeof(floatX) * n_send, sizeof(floatX) * n_recv};
        if (is_back) { halo_copy_(h, x, send, 0, halo_row_(h, p, behind), behind, C, dev); }
        else { halo_copy_(h, x, send, 0, h->before + h->n - ahead, ahead, C, dev); }
        pieces[p] = piece;
        send += n_send, recv += n_recv;
    }
    comm_wait_device(ranks->group, comm_exchange_device(ranks->group, pieces, dev, HERE), dev);
}

static inline void halo_spread(const Halo* h, floatX* x, floatX* own, int deep, int C, const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    halo_copy_(h, x, own, 1, h->before, h->n, C, dev);
    if (deep == 0) { return; }
    halo_exchange_(h, pieces, x, deep, 0, C, dev);
    for (int p = 0; p < h->ranks->place; p++) {
        const int share = halo_share_(h, deep, p, h->ranks->place);
        halo_copy_(h, x, (floatX*)pieces[p].recv, 1, halo_row_(h, p, share), share, C, dev);
    }
}

static inline void halo_collect(const Halo* h, floatX* own, floatX* x, int deep, int C, const Device* dev) {
    CommPiece pieces[RANK_GROUP_MAX];
    if (deep > 0) { halo_exchange_(h, pieces, x, deep, 1, C, dev); }
    for (int p = h->ranks->place + 1; p < h->ranks->size && deep > 0; p++) {
        const size_t share = (size_t)halo_share_(h, deep, h->ranks->place, p), n = share * (size_t)C;
        for (int b = 0; b < h->B && share > 0; b++) {
            floatX* end = x + (size_t)(b + 1) * halo_x_row_(h, C);
            residual_forward(end - n, end - n, (const floatX*)pieces[p].recv + (size_t)b * n, n, dev);
        }
    }
    halo_copy_(h, x, own, 0, h->before, h->n, C, dev);
}

static inline void halo_clear(const Halo* h, floatX* x, int C, const Device* dev) {
    const size_t n_bytes = sizeof(floatX) * (size_t)h->before * (size_t)C;
    for (int b = 0; b < h->B; b++) { device_zero(x + (size_t)b * halo_x_row_(h, C), n_bytes, dev); }
}
#endif  // LLMC_HALO_H
