/*
Ranks whose arenas lie on GPUs: bytes of device memory from each rank to each, by NCCL. The world of comm.h stays beside
it: by it the ranks meet, exchange what the host knows, and notice that one is gone. Sums are made by our own kernels,
so that results do not depend on NCCL's algorithms; only ncclSend and ncclRecv are used.
    comm_device_open      all ranks call, once, after device_init; what it opens serves the world and all groups
    comm_exchange_device  like comm_exchange, for device memory. It begins when the ops before it are done, beside those
                          after it, on a stream of its own; its buffers belong to it until
    comm_wait_device      ops after this one begin when the exchange is done. The host does not wait
    comm_sync_device      the host waits for all ops and exchanges, and stops like a call of comm.h if a rank is gone
A build without CUDA has the same calls; device memory is memory there, and the exchange is comm_exchange.
Errors: as in comm.h. A rank that stops aborts NCCL, else the process could wait in it for ever; so do the others when
        they hear of it. NCCL's own errors end the run with its text. --comm-timeout also limits the wait of
        comm_sync_device: an update must be shorter.
Order:  a rank's exchanges are done one after the other, whatever their groups: so all ranks begin those of several
        groups in one order (first the rows of a grid, then its columns), or they wait for each other.
Cost:   one grouped call; 2 events. Bytes are counted as comm.h counts them.
Source: docs.nvidia.com NCCL user guide: point-to-point calls, non-blocking communicators
*/
#ifndef LLMC_COMM_NCCL_H
#define LLMC_COMM_NCCL_H
#include "../core/device.h"  // Device, device_copy, device_sync
#include "comm.h"            // Comm, CommPiece, comm_exchange
#ifdef __CUDACC__
#include <assert.h>
#include <nccl.h>

enum { NCCL_EVENTS = 256 };  // more than the exchanges of two layers

typedef struct {
    ncclComm_t comm;
    cudaStream_t stream;           // of the exchanges
    cudaEvent_t ready;             // the ops have come this far
    cudaEvent_t done[NCCL_EVENTS]; // exchange number seq is done: done[seq % NCCL_EVENTS]
    uint64_t n_calls;
} CommNccl;

static inline const char* comm_device_kind(void) { return "NCCL, "; }  // beside comm_kind_name
static inline CommNccl* comm_nccl_(const Comm* c) { return (CommNccl*)c->link->nccl; }

static inline int comm_nccl_good_(ncclResult_t result) { return result == ncclSuccess || result == ncclInProgress; }

// NCCL has reported an error. If a rank is gone, the host's connections hear of it within a second
__attribute__((noreturn))
static inline void comm_nccl_fail_(Comm* c, ncclResult_t result, const char* where) {
    for (int i = 0; i < 100; i++) {
        comm_watch(c, where);
        usleep(10000);
    }
    fail_run("rank %d: %s: NCCL: %s", c->link->rank, where, ncclGetErrorString(result));
}

// calls return before they are done (ncclInProgress); until this one is, somebody may be gone
static inline void comm_nccl_finish_(Comm* c, ncclResult_t result, const char* where) {
    const CommNccl* nccl = comm_nccl_(c);
    const double begun = seconds_now(CLOCK_MONOTONIC);
    while (result == ncclInProgress) {
        if (ncclCommGetAsyncError(nccl->comm, &result) != ncclSuccess || result != ncclInProgress) { break; }
        comm_watch(c, where);
        if (seconds_now(CLOCK_MONOTONIC) - begun > c->link->timeout) {
            fail_run("rank %d: %s: NCCL has not finished this call for %.0f s (--comm-timeout)", c->link->rank, where,
                     c->link->timeout);
        }
        usleep(20);
    }
    if (result != ncclSuccess) { comm_nccl_fail_(c, result, where); }
}

// Finalize begins the end and returns; Destroy frees what is left, once all ranks have come to it. All the work is
// done, so a rank that does not come ends NCCL here, but not the run
static inline void comm_nccl_end_(ncclComm_t comm, double timeout) {
    const double begun = seconds_now(CLOCK_MONOTONIC);
    ncclResult_t result = ncclCommFinalize(comm);
    while (result == ncclInProgress && seconds_now(CLOCK_MONOTONIC) - begun <= timeout) {
        if (ncclCommGetAsyncError(comm, &result) == ncclSuccess && result == ncclInProgress) { usleep(20); }
    }
    if (result == ncclSuccess) { result = ncclCommDestroy(comm); } else { ncclCommAbort(comm); }
    if (result == ncclSuccess) { return; }
    fprintf(stderr, "NCCL: not all ranks have ended it: %s\n", ncclGetErrorString(result));
}

// the end of the world (comm_free), or of this process
static inline void comm_nccl_leave_(CommLink* l, int is_failing) {
    CommNccl* nccl = (CommNccl*)l->nccl;
    l->leave = NULL;
    l->nccl = NULL;
    if (is_failing) {
        ncclCommAbort(nccl->comm);
        return;  // the rest goes with the process
    }
    cudaCheck(cudaStreamSynchronize(nccl->stream));
    comm_nccl_end_(nccl->comm, l->timeout);
    for (int i = 0; i < NCCL_EVENTS; i++) { cudaCheck(cudaEventDestroy(nccl->done[i])); }
    cudaCheck(cudaEventDestroy(nccl->ready));
    cudaCheck(cudaStreamDestroy(nccl->stream));
    free(nccl);
}

// c: the world, or NULL
static inline void comm_device_open(Comm* c) {
    if (!c || c->size == 1 || c->link->nccl) { return; }
    assert(c->group == 0);  // NCCL's rank numbers are those of the world
    CommNccl* nccl = (CommNccl*)malloc_check(sizeof(CommNccl), "NCCL");
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    memset(nccl, 0, sizeof *nccl);
    cudaCheck(cudaStreamCreateWithFlags(&nccl->stream, cudaStreamNonBlocking));
    cudaCheck(cudaEventCreateWithFlags(&nccl->ready, cudaEventDisableTiming));
    for (int i = 0; i < NCCL_EVENTS; i++) {
        cudaCheck(cudaEventCreateWithFlags(&nccl->done[i], cudaEventDisableTiming));
    }
    ncclResult_t result = c->rank == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
    if (result != ncclSuccess) { fail_run("NCCL: no id for the ranks: %s", ncclGetErrorString(result)); }
    comm_wait(c, comm_broadcast(c, &id, sizeof id, DT_U8, 0, HERE));
    config.blocking = 0;
    result = ncclCommInitRankConfig(&nccl->comm, c->size, id, c->rank, &config);
    c->link->nccl = nccl;
    c->link->leave = comm_nccl_leave_;
    comm_nccl_finish_(c, result, HERE);
}

// pieces: one for each rank of the group; our own is copied
static inline CommTicket comm_exchange_device(Comm* c, const CommPiece* pieces, const Device* dev, const char* where) {
    CommNccl* nccl = comm_nccl_(c);
    const CommPiece* own = &pieces[c->rank];
    CommTicket ticket = {0};
    if (own->n_recv > 0 && own->recv != own->send) { device_copy(own->recv, own->send, own->n_recv, dev); }
    if (c->size == 1) { return ticket; }
    ticket.seq = nccl->n_calls++;
    if (c->link->check) {
        memcpy(c->piece, pieces, sizeof(CommPiece) * (size_t)c->size);
        comm_check_(c, "device exchange", DT_U8, 0, 0, where);
        c->n_calls++;
    }
    cudaCheck(cudaEventRecord(nccl->ready, dev->stream));
    cudaCheck(cudaStreamWaitEvent(nccl->stream, nccl->ready, 0));
    ncclResult_t result = ncclGroupStart();
    for (int i = 0; i < c->size; i++) {
        const CommPiece* p = &pieces[i];
        const int peer = c->members[i];
        if (i == c->rank) { continue; }
        if (p->n_send > 0 && comm_nccl_good_(result)) {
            result = ncclSend(p->send, p->n_send, ncclUint8, peer, nccl->comm, nccl->stream);
        }
        if (p->n_recv > 0 && comm_nccl_good_(result)) {
            result = ncclRecv(p->recv, p->n_recv, ncclUint8, peer, nccl->comm, nccl->stream);
        }
        c->link->bytes_sent += p->n_send;
    }
    if (!comm_nccl_good_(result)) { comm_nccl_fail_(c, result, where); }
    comm_nccl_finish_(c, ncclGroupEnd(), where);
    cudaCheck(cudaEventRecord(nccl->done[ticket.seq % NCCL_EVENTS], nccl->stream));
    return ticket;
}

// an event that was recorded again since stands for a later exchange, of which this one is a part
static inline void comm_wait_device(Comm* c, CommTicket ticket, const Device* dev) {
    if (c->size > 1) { cudaCheck(cudaStreamWaitEvent(dev->stream, comm_nccl_(c)->done[ticket.seq % NCCL_EVENTS], 0)); }
}

static inline void comm_sync_device(Comm* c, const Device* dev, const char* where) {
    if (!c || !c->link->nccl) {
        device_sync(dev);
        return;
    }
    const CommNccl* nccl = comm_nccl_(c);
    const double begun = seconds_now(CLOCK_MONOTONIC);
    cudaError_t state;
    cudaCheck(cudaEventRecord(nccl->ready, dev->stream));
    while ((state = cudaEventQuery(nccl->ready)) == cudaErrorNotReady) {
        ncclResult_t result = ncclSuccess;
        if (ncclCommGetAsyncError(nccl->comm, &result) != ncclSuccess || result != ncclSuccess) {
            comm_nccl_fail_(c, result, where);
        }
        comm_watch(c, where);
        if (seconds_now(CLOCK_MONOTONIC) - begun > c->link->timeout) {
            fail_run("rank %d: %s: the GPU has not finished for %.0f s (--comm-timeout): a rank is stuck",
                     c->link->rank, where, c->link->timeout);
        }
        usleep(20);
    }
    cudaCheck(state);
}
#else  // ---- no GPU ----

static inline const char* comm_device_kind(void) { return ""; }
static inline void comm_device_open(Comm* c) { (void)c; }

static inline CommTicket comm_exchange_device(Comm* c, const CommPiece* pieces, const Device* dev, const char* where) {
    (void)dev;
    return comm_exchange(c, pieces, where);
}

static inline void comm_wait_device(Comm* c, CommTicket ticket, const Device* dev) {
    (void)dev;
    comm_wait(c, ticket);
}

static inline void comm_sync_device(Comm* c, const Device* dev, const char* where) { (void)c, (void)dev, (void)where; }
#endif
#endif  // LLMC_COMM_NCCL_H
