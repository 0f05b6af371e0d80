/*
--cp of attention over entries (entry_attention.h): each rank has one chunk of every row (context_ranks.h), a multiple
of the tokens of an entry, and of the layers' keys
    kv        of its own positions and, in a halo (ranks/halo.h), of the window before them
    entries   makes those whose last token is its own, from v and g of its tokens and of those before them that such
              entries may have, another halo; then every rank gets all entries
    EntryRanks          of a pass, as its batch has it
    entry_before        rows of a halo that there is room for
    entry_ranks_spread, entry_ranks_collect   own rows to rows with a halo, and their gradients back
    entry_ranks_gather  entries of all ranks
    entry_ranks_sum     gradients of all entries, of which each rank has a share, become the sums of this rank's own,
                        which lie in the first rows then
    entry_ranks_room_elements   scratch
    entry_ranks_halo_sent, entry_ranks_entries_sent   floatX that the first rank sends of a layer: its own rows, as a
                        halo of others; its own entries, or their gradients
Documents: a window begins at its document's first token, so its tokens may be those of two ranks, or more.
Order:  sums over ranks in the order of places, each rounded to floatX: dkv, dentries. A channel of a token's v or g is
        in one entry, so all addends but one are 0.
*/
#ifndef LLMC_ENTRY_RANKS_H
#define LLMC_ENTRY_RANKS_H
#include "../ranks/context_parallel.h"  // cp_gather, cp_sum, cp_sends
#include "../ranks/halo.h"              // Halo, halo_spread, halo_collect, halo_sends
#include "token_batch.h"                // TokenBatch

typedef struct {
    Halo halo;
    int T;  // of whole rows
} EntryRanks;

// tokens before those of a chunk that an entry may have which ends there
static inline int entry_tokens_before(int r, int overlap) { return (1 + overlap) * r - 1; }

// deepest: of what any layer reads; T positions of the longest row
static inline int entry_before(int deepest, int T, const RankGroup* cp) {
    const int all = cp ? T - T / cp->size : 0;
    return deepest < all ? deepest : all;
}

// the widest halo has C channels, the widest entry d; entries: of all ranks, at most
static inline size_t entry_ranks_room_elements(int B, int before, int C, int entries, int d) {
    const size_t of_halo = halo_room_elements(B, before, C), of_entries = 2 * (size_t)entries * (size_t)d;
    return of_halo > of_entries ? of_halo : of_entries;
}

static inline EntryRanks entry_ranks(const TokenBatch* batch, floatX* room) {
    const EntryRanks x = {{batch->cp, batch->rows.B, batch->rows.n, batch->entries.before, room}, batch->rows.T};
    return x;
}

// what is asked for, where there is as much
static inline int entry_deep_(const EntryRanks* x, int wanted) {
    return wanted < x->halo.before ? wanted : x->halo.before;
}

// own (B*n, C) to its place among rows with a halo, of which the last `wanted` rows come
static inline void entry_ranks_spread(const EntryRanks* x, floatX* rows, floatX* own, int wanted, int C,
                                      const Device* dev) {
    halo_spread(&x->halo, rows, own, entry_deep_(x, wanted), C, dev);
}

// gradients
static inline void entry_ranks_collect(const EntryRanks* x, floatX* own, floatX* rows, int wanted, int C,
                                       const Device* dev) {
    halo_collect(&x->halo, own, rows, entry_deep_(x, wanted), C, dev);
}

// all (B * (T / r), d) of own (B * (n / r), d)
static inline void entry_ranks_gather(const EntryRanks* x, floatX* all, const floatX* own, int r, int d,
                                      const Device* dev) {
    const size_t width = sizeof(floatX) * (size_t)d;
    cp_gather(all, own, width, x->halo.room, width, x->halo.B, x->T / r, x->halo.ranks, dev);
}

static inline void entry_ranks_sum(const EntryRanks* x, floatX* all, int r, int d, const Device* dev) {
    const int entries = x->T / r;
    floatX *pack = x->halo.room, *landing = pack + (size_t)x->halo.B * (size_t)entries * (size_t)d;
    cp_sum(all, (size_t)d, all, pack, landing, d, x->halo.B, entries, x->halo.ranks, dev);
}

// of B rows of T positions, of which others want `wanted` rows of C channels
static inline double entry_ranks_halo_sent(int B, int T, int wanted, int C, const RankGroup* cp) {
    return halo_sends(B, T / cp->size, entry_before(wanted, T, cp), sizeof(floatX) * (double)C, cp);
}

static inline double entry_ranks_entries_sent(int B, int T, int r, int d, const RankGroup* cp) {
    return cp_sends(cp, B, T / r, sizeof(floatX) * (double)d);
}
#endif  // LLMC_ENTRY_RANKS_H
