/*
Before a checkpoint: ranks that hold the same parameters compare them. They compute them alike, bit by bit, so any
difference is the hardware (a flipped bit in memory, a broken device), the network, or a bug.
    replicas_find   compares sums of what all ranks have stored; all ranks call. The first slice that is not the same
                    everywhere, and who has another one than most: replicas.row -1: there is none
The same are: on a stage (--pp) what is not divided; of an expert's rows (--ep) those of one place in the groups, of
matrices that ranks share (--tp) the parts of one place.
Cost:   what a rank has stored is read once, by XXH3: on a CPU at the rate of memory, from a GPU at that of its link to
        the host, in pieces of 1 MiB. What travels are 48 bytes of each rank, and 8 for each slice once one differs.
Source: parallel.md 4.8, 12.6
*/
#ifndef LLMC_REPLICAS_H
#define LLMC_REPLICAS_H
#include "model.h"  // Model, model_held_slice
#include <xxhash.h>

enum { REPLICA_PIECE = 1 << 20 };  // bytes under one sum
typedef enum { REPLICA_OF_STAGE, REPLICA_OF_EXPERTS, REPLICA_OF_PARTS, N_REPLICA_KINDS } ReplicaKind;

typedef struct {
    int row, slice;  // of the table
    int like;        // the lowest rank that has what most have; of two ranks: the lower one
    int* others;     // of each rank: does it have something else? On the heap; NULL with row -1
} Replicas;

static inline ReplicaKind replicas_kind_(const Model* m, int row) {
    return model_row_has_ep(m, row) ? REPLICA_OF_EXPERTS : model_row_has_tp(m, row) ? REPLICA_OF_PARTS
                                                                                    : REPLICA_OF_STAGE;
}

// ranks with the same number hold the same of this kind
static inline uint64_t replicas_group_(const Model* m, ReplicaKind kind) {
    const uint64_t places[N_REPLICA_KINDS] = {0, (uint64_t)m->ranks.ep.place, (uint64_t)m->tp.place};
    return (uint64_t)m->pp.place * RANK_GROUP_MAX + places[kind];
}

// of n_bytes of device memory; room: a piece on the host, which CPU builds do not need
static inline uint64_t replicas_bytes_(const char* x, size_t n_bytes, char* room, const Device* dev) {
    const int64_t n = ceil_div((int64_t)n_bytes, REPLICA_PIECE);
    uint64_t sum = 0;
    #pragma omp parallel for reduction(+ : sum) if (DEVICE_IS_SHARED)
    for (int64_t i = 0; i < n; i++) {
        const size_t begin = (size_t)i * REPLICA_PIECE, left = n_bytes - begin;
        const size_t count = left < REPLICA_PIECE ? left : (size_t)REPLICA_PIECE;
        if (!DEVICE_IS_SHARED) { device_download(room, x + begin, count, dev); }
        sum += XXH3_64bits_withSeed(DEVICE_IS_SHARED ? x + begin : room, count, (uint64_t)i);
    }
    return sum;
}

// of slice k of a row as it is stored, with its scales; 0: it is elsewhere
static inline uint64_t replicas_slice_(const Model* m, int row, int k, char* room, const Device* dev) {
    const Tensor* held = &m->held[row];
    const int slice = model_held_slice(m, row, k);
    const size_t n = model_part_elements(m, row);
    const char* arena = (const char*)m->w.stored;
    if (slice < 0) { return 0; }
    uint64_t sum = replicas_bytes_(arena + tensor_stored_place(held, n * (size_t)slice), tensor_stored_size(held, n),
                                   room, dev);
    if (!tensor_has_scales(held)) { return sum; }
    return sum + replicas_bytes_(arena + tensor_scales_place(held, slice), tensor_scale_bytes(held, held->stored), room,
                                 dev);
}

// who of the ranks of a group has another sum than most of them: found; of an equal number the lowest rank's counts
static inline int replicas_vote_(Replicas* x, const uint64_t* sums, const uint64_t* groups, size_t step, int P,
                                 uint64_t group) {
    int most = 0, n_others = 0;
    for (int i = 0; i < P; i++) {
        int n = 0;
        for (int j = 0; j < P && groups[i * step] == group; j++) {
            n += groups[j * step] == group && sums[j * step] == sums[i * step];
        }
        if (n > most) { most = n, x->like = i; }
    }
    for (int i = 0; i < P; i++) {
        x->others[i] = groups[i * step] == group && sums[i * step] != sums[x->like * step];
        n_others += x->others[i];
    }
    return n_others;
}

// all: of each rank, for each kind, sum and group
static inline int replicas_differ_(const uint64_t* all, int P, ReplicaKind kind) {
    const uint64_t* at = all + 2 * kind;
    for (int i = 0; i < P; i++) {
        for (int j = 0; j < i; j++) {
            const uint64_t *a = at + 2 * N_REPLICA_KINDS * i, *b = at + 2 * N_REPLICA_KINDS * j;
            if (a[1] == b[1] && a[0] != b[0]) { return 1; }
        }
    }
    return 0;
}

// sums: of every slice, of each rank; all: as above
static inline void replicas_name_(Replicas* x, const Model* m, const uint64_t* sums, const uint64_t* all, int P) {
    uint64_t* of_slice = (uint64_t*)malloc_check(2 * sizeof(uint64_t) * (size_t)P, "sums of ranks");
    for (int row = 0, first = 0; row < m->n_table; first += tensor_slices(&m->table[row++])) {
        const ReplicaKind kind = replicas_kind_(m, row);
        for (int k = 0; k < tensor_slices(&m->table[row]); k++) {
            for (int i = 0; i < P; i++) {
                of_slice[2 * i] = sums[(size_t)m->n_slices * (size_t)i + (size_t)(first + k)];
                of_slice[2 * i + 1] = all[2 * (N_REPLICA_KINDS * i + (int)kind) + 1];
            }
            for (int i = 0; i < P; i++) {
                if (!replicas_vote_(x, of_slice, of_slice + 1, 2, P, of_slice[2 * i + 1])) { continue; }
                x->row = row, x->slice = k;
                free(of_slice);
                return;
            }
        }
    }
    free(of_slice);
}

static inline Replicas replicas_find(const Model* m, Comm* c, const Device* dev) {
    Replicas x = {-1, 0, 0, NULL};
    uint64_t own[2 * N_REPLICA_KINDS] = {0};
    if (c->size == 1) { return x; }
    const size_t P = (size_t)c->size, n = (size_t)m->n_slices;
    uint64_t* all = (uint64_t*)malloc_check(sizeof own * P, "sums of ranks");
    uint64_t* slices = (uint64_t*)malloc_check(sizeof(uint64_t) * n, "sums of parameters");
    char* room = DEVICE_IS_SHARED ? NULL : (char*)device_pinned(REPLICA_PIECE, "parameters on their way to a sum");
    device_sync(dev);
    for (int kind = 0; kind < N_REPLICA_KINDS; kind++) { own[2 * kind + 1] = replicas_group_(m, (ReplicaKind)kind); }
    for (int row = 0, slice = 0; row < m->n_table; row++) {
        for (int k = 0; k < tensor_slices(&m->table[row]); k++, slice++) {
            slices[slice] = replicas_slice_(m, row, k, room, dev);
            own[2 * replicas_kind_(m, row)] += slices[slice] * (2 * (uint64_t)slice + 1);  // which one counts, too
        }
    }
    if (room) { device_pinned_free(room); }
    comm_wait(c, comm_all_gather(c, own, all, 2 * N_REPLICA_KINDS, DT_I64, HERE));
    int differ = 0;
    for (int kind = 0; kind < N_REPLICA_KINDS; kind++) { differ |= replicas_differ_(all, c->size, (ReplicaKind)kind); }
    if (differ) {
        uint64_t* of_all = (uint64_t*)malloc_check(sizeof(uint64_t) * n * P, "sums of parameters");
        comm_wait(c, comm_all_gather(c, slices, of_all, n, DT_I64, HERE));
        x.others = (int*)malloc_check(sizeof(int) * P, "ranks");
        replicas_name_(&x, m, of_all, all, c->size);
        free(of_all);
    }
    free(slices);
    free(all);
    return x;
}
#endif  // LLMC_REPLICAS_H
