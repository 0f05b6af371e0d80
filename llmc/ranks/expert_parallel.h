/*
Rows of experts on their way between ranks that share the experts of a layer (expert_ranks.h). Each rank has sorted its
rows by expert (ops/expert_rows.h), so that those for one rank lie together; what a rank receives lies one *source*
after the other, and within a source expert after expert. A source is a leaf of the update or, where ranks compute one
together (--tp), a part of its positions; sources of a leaf follow each other.
    ep_open, ep_close
    ep_find        once a layer's rows are found: which rows this rank computes. It is ranks.size sources; alone one,
                   whose rows lie with their tokens
    ep_sends       do rows travel at all? Not alone, and not where all ranks have the same tokens (`is_same`, as when
                   they generate one text together): then each computes the rows of its experts where they lie
    ep_send        rows (R, width) of this rank, sorted by expert, become those that it computes (n_rows, width)
    ep_return      and back: the owner of a token gets what its experts say. With is_same every rank gets all rows
All ranks of a group call, with whatever they have; R may be 0.
Cost:   ep_find waits for the device: the host must know how many rows go where. Each row travels once to every expert
        that it chose on another rank, R * width * (1 - 1/G) bytes in each direction.
Order:  rows of a source come in its own order, so an expert sees the tokens of a leaf as one rank alone would.
Errors: fail_run, when more rows come than there is room for.
Source: Lepikhin et al. 2020, GShard, arXiv:2006.16668; without dropping: Gale et al. 2022, arXiv:2211.15841
*/
#ifndef LLMC_EXPERT_PARALLEL_H
#define LLMC_EXPERT_PARALLEL_H
#include "../ops/expert_rows.h"  // ExpertRows
#include "comm_nccl.h"           // comm_exchange_device
#include "expert_ranks.h"        // ExpertRanks

// rows that one rank of the group has sent, or all that this rank computes
typedef struct {
    int first, n;        // first .. first + n - 1 of the rows that this rank computes
    const int* offsets;  // (n_held + 1) on the device: where the rows of each expert begin, from 0 to n
    const int* token;    // (n) on the device: where each of them lies. NULL: one after the other
} ExpertSource;

typedef struct {
    const ExpertRanks* ranks;
    int E, n_held, first;  // experts of a layer; of them n_held, from number `first` on, are this rank's
    int most;              // rows that there is room for
    double usual;          // of them those of --ep-room 1
    int is_same;           // all ranks of the group have the same tokens
    int n_sources, n_rows; // of the layer that is computed now
    ExpertSource* source;
    int parts, n_leaves;   // sources of a leaf; leaves
    ExpertSource* leaf;    // the sources of each together, whose rows are found by number. With one part: `source`
    int* begins;           // (E + 1) where each expert's rows begin among those of this rank, on the host
    int* counts;           // (ranks, n_held) rows that come
    int* host;             // (ranks, n_held + 1) offsets of each source, then of each leaf of several, and
    int* offsets;          // the same on the device
    int* numbers;          // (most) of rows, leaf after leaf, on the host, and
    int* device_numbers;   // on the device. With one part: NULL
    CommPiece* piece;      // one for each rank of the group
} ExpertParallel;

static inline size_t ep_offsets_bytes_(const ExpertParallel* ep) {
    const int n_leaves = ep->parts > 1 ? ep->ranks->ep.size / ep->parts : 0;
    return sizeof(int) * (size_t)(ep->ranks->ep.size + n_leaves) * ((size_t)ep->n_held + 1);
}

// E: experts of a layer, of all ranks; most: rows that this rank can compute at once; usual: where all are equally busy
static inline void ep_open(ExpertParallel* ep, const ExpertRanks* ranks, int E, int most, double usual, int is_same) {
    const size_t size = (size_t)ranks->ep.size;
    memset(ep, 0, sizeof *ep);
    ep->ranks = ranks;
    ep->E = E;
    ep->n_held = E / ranks->ep.size;
    ep->first = ranks->ep.place * ep->n_held;
    ep->most = most, ep->usual = usual;
    ep->is_same = is_same;
    ep->parts = is_same ? 1 : expert_ranks_parts(ranks);
    ep->source = (ExpertSource*)malloc_check(sizeof(ExpertSource) * size, "rows of experts");
    ep->leaf = ep->parts == 1 ? ep->source : (ExpertSource*)malloc_check(sizeof(ExpertSource) * size, "leaves");
    if (size == 1) { return; }
    comm_device_open(ranks->world);  // a run that only evaluates has not done it
    ep->begins = (int*)malloc_check(sizeof(int) * ((size_t)E + 1), "rows of experts");
    ep->counts = (int*)malloc_check(sizeof(int) * (size_t)E, "rows of experts");
    ep->host = (int*)malloc_check(ep_offsets_bytes_(ep), "rows of experts");
    ep->offsets = (int*)device_alloc(ep_offsets_bytes_(ep), "rows of experts");
    ep->piece = (CommPiece*)malloc_check(sizeof(CommPiece) * size, "rows of experts");
    if (ep->parts == 1) { return; }
    ep->numbers = (int*)malloc_check(sizeof(int) * (size_t)most, "rows of experts");
    ep->device_numbers = (int*)device_alloc(sizeof(int) * (size_t)most, "rows of experts");
}

static inline void ep_close(ExpertParallel* ep) {
    if (ep->offsets) { device_release(ep->offsets, ep_offsets_bytes_(ep)); }
    if (ep->device_numbers) { device_release(ep->device_numbers, sizeof(int) * (size_t)ep->most); }
    if (ep->leaf != ep->source) { free(ep->leaf); }
    free(ep->source);
    free(ep->numbers);
    free(ep->begins);
    free(ep->counts);
    free(ep->host);
    free(ep->piece);
    memset(ep, 0, sizeof *ep);
}

static inline int ep_sends(const ExpertParallel* ep) { return ep->ranks->ep.size > 1 && !ep->is_same; }

// one more source, of the rows counts (n_held)
static inline void ep_add_source_(ExpertParallel* ep, const int* counts, const int* token) {
    const size_t at = (size_t)ep->n_sources * ((size_t)ep->n_held + 1);
    int* begins = ep->host + at;
    begins[0] = 0;
    for (int e = 0; e < ep->n_held; e++) { begins[e + 1] = begins[e] + counts[e]; }
    const ExpertSource source = {ep->n_rows, begins[ep->n_held], ep->offsets + at, token};
    ep->source[ep->n_sources++] = source;
    ep->n_rows += source.n;
}

// rows of this rank's experts that the group has; each rank tells the others how many it has for theirs
static inline void ep_exchange_counts_(ExpertParallel* ep) {
    Comm* group = ep->ranks->ep.group;
    int* own = (int*)malloc_check(sizeof(int) * (size_t)ep->E, "rows of experts");
    const size_t n_bytes = sizeof(int) * (size_t)ep->n_held;
    for (int e = 0; e < ep->E; e++) { own[e] = ep->begins[e + 1] - ep->begins[e]; }
    for (int rank = 0; rank < group->size; rank++) {
        const CommPiece piece = {own + rank * ep->n_held, ep->counts + rank * ep->n_held, n_bytes, n_bytes};
        ep->piece[rank] = piece;
    }
    comm_wait(group, comm_exchange(group, ep->piece, HERE));
    free(own);
}

// Leaf i, of the sources that follow each other from number i * parts on: of each expert the rows of all these. `first`
// of their numbers are those of the leaves before
static inline int ep_join_sources_(ExpertParallel* ep, int i, int first) {
    const ExpertSource* source = &ep->source[i * ep->parts];
    const size_t each = (size_t)ep->n_held + 1, at = (size_t)(ep->ranks->ep.size + i) * each;
    int *begins = ep->host + at, n = 0;
    for (int e = 0; e < ep->n_held; e++) {
        begins[e] = n;
        for (int p = 0; p < ep->parts; p++) {
            const int* own = ep->host + (size_t)(i * ep->parts + p) * each;
            for (int row = own[e]; row < own[e + 1]; row++) { ep->numbers[first + n++] = source[p].first + row; }
        }
    }
    begins[ep->n_held] = n;
    const ExpertSource leaf = {0, n, ep->offsets + at, ep->device_numbers + first};
    ep->leaf[i] = leaf;
    return n;
}

// rows: found for the layer that is computed now
static inline void ep_find(ExpertParallel* ep, const ExpertRows* rows, const Device* dev) {
    ep->n_sources = ep->n_rows = 0;
    if (ep->ranks->ep.size == 1) {
        const ExpertSource all = {0, rows->N * rows->k, rows->offsets, rows->token};
        ep->source[ep->n_sources++] = all;
        ep->n_rows = all.n;
        ep->n_leaves = 1;
        return;
    }
    device_download(ep->begins, rows->offsets, sizeof(int) * ((size_t)ep->E + 1), dev);
    if (ep->is_same) {
        for (int e = 0; e < ep->n_held; e++) {
            ep->counts[e] = ep->begins[ep->first + e + 1] - ep->begins[ep->first + e];
        }
        ep_add_source_(ep, ep->counts, rows->token + ep->begins[ep->first]);
    } else {
        ep_exchange_counts_(ep);
        for (int p = 0; p < ep->ranks->ep.size; p++) { ep_add_source_(ep, ep->counts + p * ep->n_held, NULL); }
    }
    if (ep->n_rows > ep->most) {
        fail_input("--ep-room: %d rows chose the experts of this rank, there is room for %d: --ep-room %g or more, or "
                   "0, which has room for all that can come", ep->n_rows, ep->most,
                   ceil(10.0 * ep->n_rows / ep->usual) / 10.0);
    }
    ep->n_leaves = ep->n_sources / ep->parts;
    for (int i = 0, n = 0; i < ep->n_leaves && ep->parts > 1; i++) { n += ep_join_sources_(ep, i, n); }
    if (ep->parts > 1) { device_upload(ep->device_numbers, ep->numbers, sizeof(int) * (size_t)ep->n_rows, dev); }
    device_upload(ep->offsets, ep->host, ep_offsets_bytes_(ep), dev);
}

// where this rank's rows for another begin, and how many they are
static inline size_t ep_begin_(const ExpertParallel* ep, int rank) { return (size_t)ep->begins[rank * ep->n_held]; }
static inline size_t ep_count_(const ExpertParallel* ep, int rank) {
    return ep_begin_(ep, rank + 1) - ep_begin_(ep, rank);
}

static inline void ep_exchange_(const ExpertParallel* ep, const Device* dev, const char* where) {
    Comm* group = ep->ranks->ep.group;
    comm_wait_device(group, comm_exchange_device(group, ep->piece, dev, where), dev);
}

// width: bytes of a row
static inline void ep_send(const ExpertParallel* ep, void* to, const void* from, size_t width, const Device* dev) {
    for (int rank = 0; rank < ep->ranks->ep.size; rank++) {
        const ExpertSource* source = &ep->source[rank];
        const CommPiece piece = {(const char*)from + width * ep_begin_(ep, rank),
                                 (char*)to + width * (size_t)source->first, width * ep_count_(ep, rank),
                                 width * (size_t)source->n};
        ep->piece[rank] = piece;
    }
    ep_exchange_(ep, dev, HERE);
}

static inline void ep_return(const ExpertParallel* ep, void* to, const void* from, size_t width, const Device* dev) {
    for (int rank = 0; rank < ep->ranks->ep.size; rank++) {
        const ExpertSource* source = &ep->source[ep->is_same ? 0 : rank];
        const CommPiece piece = {(const char*)from + width * (size_t)source->first,
                                 (char*)to + width * ep_begin_(ep, rank), width * (size_t)source->n,
                                 width * ep_count_(ep, rank)};
        ep->piece[rank] = piece;
    }
    ep_exchange_(ep, dev, HERE);
}
#endif  // LLMC_EXPERT_PARALLEL_H
