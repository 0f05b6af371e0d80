/*
A stand-in for NCCL: the calls of llmc/ranks/comm_nccl.h, between processes of this machine. Ranks share a file in memory, named by the
unique id and removed when all have it open; it holds a ring of bytes for each pair of ranks. Streams are not looked at: what is
sent is read when the call is made, and what is received is there when the call is done.
    blocking = 0   as in the real one, calls return ncclInProgress and go on inside ncclCommGetAsyncError; else they wait
    a rank that dies or aborts leaves ncclRemoteError to those that wait for it: each holds a lock of the file as long as it lives
It ends the program, with the reason, where the real one may wait for ever or mix up numbers: another count than the other
side's, memory that is not the device's or too short, calls outside of a group that would wait for each other, Destroy before
Finalize is done.
*/
#ifndef SIMT_NCCL_H
#define SIMT_NCCL_H
#include "cuda_runtime.h"
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#define NCCL_VERSION_CODE 22800
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct { char internal[NCCL_UNIQUE_ID_BYTES]; } ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;
typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt64 = 4,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9
} ncclDataType_t;
typedef struct { int blocking; } ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {INT_MIN}

static inline const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "remote process exited or there was a network error";
        case ncclInProgress: return "NCCL operation in progress";
        default: return "unhandled system error";
    }
}

// ---- the shared file: SimtMeeting, then one SimtRing for each pair, from i to j at i * size + j ----

enum { SIMT_RING = 64 << 10, SIMT_RANKS = 64 };

struct alignas(64) SimtMeeting {  // the rings come behind it
    int size;      // of the first rank that came
    int n_open;    // ranks that have the file open
    int n_ended;   // ranks that have called Finalize
};

// bytes written and read so far; number b lies at bytes[b % SIMT_RING]
struct SimtRing {
    uint64_t written, read;
    char bytes[SIMT_RING];
};

struct SimtMessage {
    int peer, sends;
    char* data;
    uint64_t n_bytes, n_moved;  // without and with the 8 bytes of the length that go first
};

struct ncclComm {
    int rank, size, fd, blocking, all_open, finalized;
    std::string path;
    SimtMeeting* meeting;
    SimtRing* rings;
    size_t n_mapped;
    ncclResult_t state;
    std::vector<SimtMessage> messages;  // under way, in the order of the calls
};
typedef ncclComm* ncclComm_t;

struct SimtGroup {
    int depth;
    std::vector<ncclComm_t> comms;  // that have got messages in this group
};
static inline SimtGroup& simt_group_() {
    static SimtGroup group;
    return group;
}

static inline ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    unsigned char random[16];
    int fd = open("/dev/urandom", O_RDONLY);
    int found = fd >= 0 && read(fd, random, sizeof random) == (ssize_t)sizeof random;
    if (fd >= 0) { close(fd); }
    memset(id, 0, sizeof *id);
    for (size_t i = 0; found && i < sizeof random; i++) { snprintf(id->internal + 2 * i, 3, "%02x", random[i]); }
    return found ? ncclSuccess : ncclSystemError;
}

// does the process of this rank live? It holds a lock on byte `rank` of the file
static inline int simt_lives_(const ncclComm* comm, int rank) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_start = rank;
    lock.l_len = 1;
    return rank == comm->rank || (fcntl(comm->fd, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK);
}

// ---- moving bytes ----

// what fits into the ring, or what lies in it; returns the number of bytes
static inline uint64_t simt_ring_move_(SimtRing* ring, int sends, char* data, uint64_t n) {
    uint64_t written = __atomic_load_n(&ring->written, __ATOMIC_ACQUIRE), taken = __atomic_load_n(&ring->read, __ATOMIC_ACQUIRE);
    uint64_t possible = sends ? SIMT_RING - (written - taken) : written - taken;
    n = n < possible ? n : possible;
    for (uint64_t i = 0; i < n;) {
        uint64_t at = ((sends ? written : taken) + i) % SIMT_RING, part = n - i < SIMT_RING - at ? n - i : SIMT_RING - at;
        if (sends) { memcpy(ring->bytes + at, data + i, part); } else { memcpy(data + i, ring->bytes + at, part); }
        i += part;
    }
    __atomic_store_n(sends ? &ring->written : &ring->read, (sends ? written : taken) + n, __ATOMIC_RELEASE);
    return n;
}

// returns whether anything moved. The length travels whole: it is the first thing after messages that have been read whole
static inline int simt_message_move_(ncclComm* comm, SimtMessage* m) {
    SimtRing* ring = &comm->rings[m->sends ? comm->rank * comm->size + m->peer : m->peer * comm->size + comm->rank];
    const uint64_t before = m->n_moved;
    if (m->n_moved == 0) {
        uint64_t length = m->n_bytes, used = ring->written - ring->read;
        if (m->sends ? SIMT_RING - used < sizeof length : used < sizeof length) { return 0; }
        m->n_moved = simt_ring_move_(ring, m->sends, (char*)&length, sizeof length);
        if (length != m->n_bytes) {
            simt_fail("ncclRecv: rank %d sends %llu bytes, rank %d expects %llu", m->peer, (unsigned long long)length, comm->rank,
                      (unsigned long long)m->n_bytes);
        }
    }
    uint64_t done = m->n_moved - sizeof(uint64_t);
    m->n_moved += simt_ring_move_(ring, m->sends, m->data + done, m->n_bytes - done);
    return m->n_moved > before;
}

static inline int simt_messages_move_(ncclComm* comm) {
    SimtAccess access;
    int moved = 0;
    std::vector<int> busy(2 * (size_t)comm->size, 0);
    std::vector<SimtMessage> rest;
    for (SimtMessage& m : comm->messages) {
        int& in_use = busy[(size_t)(2 * m.peer + m.sends)];
        if (!in_use) { moved |= simt_message_move_(comm, &m); }
        if (m.n_moved == m.n_bytes + sizeof(uint64_t)) { continue; }
        in_use = 1;  // what comes after it waits
        rest.push_back(m);
    }
    comm->messages = rest;
    return moved;
}

// Finalize is done once all ranks have called it. Nobody destroys before, so a rank that has gone until then is an error
static inline ncclResult_t simt_end_(const ncclComm* comm) {
    for (int rank = 0; rank < comm->size; rank++) {
        const int lives = simt_lives_(comm, rank);
        if (__atomic_load_n(&comm->meeting->n_ended, __ATOMIC_ACQUIRE) == comm->size) { return ncclSuccess; }
        if (!lives) { return ncclRemoteError; }
    }
    return ncclInProgress;
}

// ncclInProgress until all ranks have come and all messages have moved
static inline ncclResult_t simt_progress_(ncclComm* comm) {
    if (comm->state != ncclInProgress) { return comm->state; }
    if (!comm->all_open) {
        if (__atomic_load_n(&comm->meeting->n_open, __ATOMIC_ACQUIRE) < comm->size) { return ncclInProgress; }
        comm->all_open = 1;
        unlink(comm->path.c_str());
    }
    int moved = simt_messages_move_(comm);
    for (size_t i = 0; !moved && i < comm->messages.size(); i++) {
        if (simt_lives_(comm, comm->messages[i].peer)) { continue; }
        moved = simt_messages_move_(comm);  // what it sent before it went
        if (!moved) { return comm->state = ncclRemoteError; }
    }
    if (comm->finalized) { return comm->state = simt_end_(comm); }
    return comm->state = comm->messages.empty() ? ncclSuccess : ncclInProgress;
}

static inline ncclResult_t simt_settle_(ncclComm* comm) {
    comm->state = comm->state == ncclSuccess ? ncclInProgress : comm->state;
    while (simt_progress_(comm) == ncclInProgress && comm->blocking) { sched_yield(); }
    return comm->state;
}

static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    *state = simt_progress_(comm);
    if (*state == ncclInProgress) { sched_yield(); }
    return ncclSuccess;
}

// ---- communicators ----

static inline ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank,
                                                  const ncclConfig_t* config) {
    if (size < 1 || size > SIMT_RANKS || rank < 0 || rank >= size) { return ncclInvalidArgument; }
    ncclComm* comm = new ncclComm();
    comm->rank = rank;
    comm->size = size;
    comm->blocking = config->blocking != 0;
    comm->path = std::string("/dev/shm/simt_nccl_") + std::string(id.internal, strnlen(id.internal, 32));
    comm->n_mapped = sizeof(SimtMeeting) + sizeof(SimtRing) * (size_t)(size * size);
    comm->fd = open(comm->path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (comm->fd < 0 || ftruncate(comm->fd, (off_t)comm->n_mapped) != 0) { return ncclSystemError; }
    comm->meeting = (SimtMeeting*)mmap(NULL, comm->n_mapped, PROT_READ | PROT_WRITE, MAP_SHARED, comm->fd, 0);
    if (comm->meeting == MAP_FAILED) { return ncclSystemError; }
    comm->rings = (SimtRing*)(comm->meeting + 1);
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_start = rank;
    lock.l_len = 1;
    if (fcntl(comm->fd, F_SETLK, &lock) != 0) { simt_fail("ncclCommInitRank: two processes say that they are rank %d", rank); }
    int first = 0, is_first = __atomic_compare_exchange_n(&comm->meeting->size, &first, size, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    if (!is_first && first != size) {
        simt_fail("ncclCommInitRank: rank %d counts %d ranks, another one %d", rank, size, first);
    }
    __atomic_fetch_add(&comm->meeting->n_open, 1, __ATOMIC_ACQ_REL);
    comm->state = ncclInProgress;
    *out = comm;
    return simt_settle_(comm);
}

static inline ncclResult_t simt_leave_(ncclComm* comm) {
    if (!comm->all_open) { unlink(comm->path.c_str()); }
    munmap(comm->meeting, comm->n_mapped);
    close(comm->fd);  // and with it the lock
    delete comm;
    return ncclSuccess;
}

// returns ncclInProgress where the communicator does not block, as the other calls
static inline ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (comm->finalized) { simt_fail("ncclCommFinalize: a second time"); }
    if (!comm->messages.empty()) { simt_fail("ncclCommFinalize: %zu messages are on their way", comm->messages.size()); }
    comm->finalized = 1;
    __atomic_fetch_add(&comm->meeting->n_ended, 1, __ATOMIC_ACQ_REL);
    return simt_settle_(comm);
}

static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm->finalized) { simt_fail("ncclCommDestroy: expected ncclCommFinalize before it"); }
    if (comm->state == ncclInProgress) { simt_fail("ncclCommDestroy: ncclCommFinalize is not done"); }
    return simt_leave_(comm);
}

static inline ncclResult_t ncclCommAbort(ncclComm_t comm) { return simt_leave_(comm); }

// ---- groups, sends and receives ----

static inline ncclResult_t ncclGroupStart() {
    simt_group_().depth++;
    return ncclSuccess;
}

static inline ncclResult_t ncclGroupEnd() {
    SimtGroup& group = simt_group_();
    ncclResult_t result = ncclSuccess;
    if (group.depth == 0) { simt_fail("ncclGroupEnd without ncclGroupStart"); }
    if (--group.depth > 0) { return ncclSuccess; }
    for (ncclComm_t comm : group.comms) {
        ncclResult_t state = simt_settle_(comm);
        result = result == ncclSuccess || state > ncclSuccess ? state : result;
    }
    group.comms.clear();
    return result;
}

static inline ncclResult_t simt_message_(const char* call, int sends, void* data, size_t count, ncclDataType_t type, int peer,
                                         ncclComm_t comm) {
    const size_t bytes[] = {1, 1, 4, 0, 8, 0, 0, 4, 8, 2};
    if (simt_group_().depth == 0) { simt_fail("%s outside of a group: two ranks that send to each other would wait for ever", call); }
    if (simt_capturing) { simt_fail("%s: messages in a capture are not modelled", call); }
    if (peer < 0 || peer >= comm->size) { return ncclInvalidArgument; }
    simt_check_range(call, sends ? "source" : "destination", data, count * bytes[type], 1);
    comm->messages.push_back(SimtMessage{peer, sends, (char*)data, count * bytes[type], 0});
    simt_group_().comms.push_back(comm);
    return comm->blocking ? ncclSuccess : ncclInProgress;  // the manual allows both: a call must not be taken for refused
}

static inline ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    return simt_message_("ncclSend", 1, (void*)data, count, type, peer, comm);
}

static inline ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t) {
    return simt_message_("ncclRecv", 0, data, count, type, peer, comm);
}
#endif  // SIMT_NCCL_H
