/*
Ranks: P processes that train one model together, and every call by which they exchange numbers.
    comm_world                          finds the others (comm_launch.h says who we are); P = 1: a world of its own
    comm_exchange                       any bytes from each to each; the calls below are made of it
    comm_all_gather, comm_all_gather_v  everybody's numbers to everybody, of one size or of several;
                                        comm_all_gather_shares
    comm_send_recv, comm_broadcast      to one and from one; from one to all
    comm_all_reduce                     sums, maxima, minima: always added in the order of ranks 0, 1, 2, ...
    comm_barrier                        wait for all
    comm_every                          groups of ranks: every s-th of others
    comm_wait                           until a call is done
    comm_health, comm_watch             is somebody gone?
    comm_note, comm_free                what messages add; the end
All of this is about host memory; arenas of a GPU travel by comm_nccl.h, beside the same world.
Kinds: NONE (P = 1: a call copies at most), TCP (comm_tcp.h, in every build), MPI (comm_mpi.h, make MPI=1). Only bytes
travel by them and sums are made here, so all kinds give the same bits. PLAN: this process is alone and plans what one
of P ranks would do (run/plan.h): nothing travels, and in reductions and all_gather everybody else says what it says.
Tickets: a call returns at once with a ticket; its buffers belong to it until comm_wait. Bytes move inside these calls
only.
Reductions are the exception: they are done when they return.
Order: all ranks of a group make the same calls in the same order; who has nothing to send calls with zero counts;
decisions that depend on data are taken from values that all share. `where` is HERE, the line of the call, for messages.
COMM_CHECK=1 in the environment: before each call the ranks compare what they are about to do, and stop with both lines
if it is not the same. When something goes wrong the last 16 calls are printed, with their times.
Errors: fail_input is for all ranks. Those that find the same error of the user (a bad file, options that contradict
each other) print it once: a rank above 0 tells the others that it stops, and waits with its line until the lower ranks
have stopped too or 3 s have passed; it speaks if none of them has the same line. An error that only some ranks have is
said by the lowest of them, with its number. All end with status 2. Before the ranks have met nobody can be asked, and
each speaks for itself.
Faults: a rank that dies ends all others at once with one line that names it; one that does not answer does so after the
time limit. Nothing waits for ever.
Cost:   bytes sent are counted: all_gather n(P-1), exchange its counts, all_reduce of n 2n(P-1)/P for each rank.
Explained in doc/ranks.md
*/
#ifndef LLMC_COMM_H
#define LLMC_COMM_H
#include "../core/print.h"  // seconds_now
#include "comm_mpi.h"       // MpiMesh, with MPI=1
#include "comm_tcp.h"       // TcpMesh, RankPlace

#define HERE_TEXT_(line) #line
#define HERE_LINE_(line) HERE_TEXT_(line)
#define HERE __FILE__ ":" HERE_LINE_(__LINE__)

typedef enum { COMM_NONE, COMM_TCP, COMM_MPI, COMM_PLAN } CommKind;
typedef enum { DT_F32, DT_F64, DT_I32, DT_I64, DT_U8 } CommType;
typedef enum { OP_SUM, OP_MAX, OP_MIN } CommOp;
typedef struct { uint64_t seq; } CommTicket;

// what one call sends to one rank and receives from it
typedef struct {
    const void* send;
    void* recv;
    size_t n_send, n_recv;  // bytes
} CommPiece;

typedef struct {  // of the COMM_CHECK comparison
    char name[24], where[104];
    int32_t type, op, group;
    uint64_t seq, count;
    uint64_t n_bytes;  // the bytes that go to the receiver of this description
} CommDescription;

typedef struct {
    const char *name, *where;
    uint64_t id;            // the same on all ranks: CommHead.call
    CommPiece* piece;       // for each rank of the world
    int n_open;             // sends and receives that are not done
    size_t n_bytes;         // sent in all
    double begun, done;
} CommCall;

enum { COMM_CALLS = 64 };  // at most under way at once; the finished ones among them are the trace

// Goes before the bytes of a call from one rank to another, by TCP. Whoever made another call, or one of another
// length, is found out before a byte is used.
typedef struct {
    uint64_t call;     // which: a hash of its name, group and number
    uint64_t n_bytes;  // that follow
} CommHead;

typedef struct {
    CommHead head;
    size_t n;  // bytes of it that have come or gone
} CommHeadPart;

// what all groups of a process share: the connections and the calls on them
typedef struct CommLink {
    CommKind kind;
    int rank, size, check, is_failing;
    uint64_t said;               // hash of the line that fail_input has for the user, 0: none
    const char* source;
    double timeout;              // seconds without a byte after which a call is given up
    double patience;             // seconds in which lower ranks may say the line that this rank has for the user
    TcpMesh tcp;
#ifdef USE_MPI
    MpiMesh mpi;
#endif
    CommCall call[COMM_CALLS];   // number seq lies at seq % COMM_CALLS
    uint64_t n_calls;            // begun so far
    uint64_t *sending, *receiving;  // for each rank: the call whose piece moves now
    CommHeadPart *head_out, *head_in;  // ... and what goes before it
    int n_groups;
    uint64_t bytes_sent;
    double seconds_waited, counted_since;
    char note[512];              // comm_note
    struct pollfd* polled;
    unsigned char* scratch;
    size_t n_scratch;
    void* nccl;                  // what comm_nccl.h keeps for exchanges between GPUs, and how it is given back
    void (*leave)(struct CommLink* link, int is_failing);
} CommLink;

typedef struct Comm {
    int rank, size;
    int* members;     // their ranks in the world
    int group;        // its number, the same on all members; 0: the world
    uint64_t n_calls;
    CommPiece* piece; // for the call that is being put together
    CommLink* link;
} Comm;

static inline size_t comm_type_bytes(CommType type) {
    const size_t bytes[] = {4, 8, 4, 8, 1};
    return bytes[type];
}

static inline const char* comm_kind_name(const Comm* c) {
    const char* names[] = {"one process", "TCP", "MPI", "nothing"};
    return names[c->link->kind];
}

static inline int comm_is_plan(const Comm* c) { return c->link->kind == COMM_PLAN; }

// ---- 1. When something goes wrong ----

// what a message adds: where the run stands and what to do, "after step 12; go on with ..."
__attribute__((format(printf, 2, 3)))
static inline void comm_note(Comm* c, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->link->note, sizeof c->link->note, format, args);
    va_end(args);
}

// of HERE the file without its folder, "data_parallel.h:444": names of headers are unique
static inline const char* comm_place_(const char* where) {
    const char* slash = strrchr(where, '/');
    return slash ? slash + 1 : where;
}

static inline void comm_print_trace_(const CommLink* l) {
    double now = seconds_now(CLOCK_MONOTONIC);
    uint64_t first = l->n_calls > 16 ? l->n_calls - 16 : 0;
    for (uint64_t i = first; i < l->n_calls; i++) {
        const CommCall* t = &l->call[i % COMM_CALLS];
        double end = t->n_open == 0 ? t->done : now;
        fprintf(stderr, "  rank %d, call %llu: %s at %s, %zu bytes sent, %s %.3f s\n", l->rank, (unsigned long long)i,
                t->name, comm_place_(t->where), t->n_bytes, t->n_open == 0 ? "took" : "not done after", end - t->begun);
    }
}

// One line, last words for the others, and out. Where the run stands says the first rank that is left
__attribute__((noreturn))
static inline void comm_stop_(CommLink* l, const CommCall* call, TcpNote note) {
    l->is_failing = 1;
    if (l->kind == COMM_TCP) { tcp_leave_note(&l->tcp, &note); }
    if (l->leave) { l->leave(l, 1); }
    if (note.status == 2) {  // the culprit has told the user what is wrong
        fflush(stdout);
        exit(2);
    }
    if (l->check) { comm_print_trace_(l); }
    const int is_first = l->rank == (note.rank == 0);
    fail_run("rank %d %s, so rank %d stops in %s (%s)%s%s", note.rank, note.text, l->rank, call->name,
             comm_place_(call->where), is_first && *l->note ? " " : "", is_first ? l->note : "");
}

// One rank seems to be to blame. Its last words may name another one, for who waits for a stopped rank looks stopped
// too; those of that one are then asked for, until somebody has none or speaks of itself.
__attribute__((noreturn))
static inline void comm_blame_(CommLink* l, const CommCall* call, TcpNote blamed) {
    TcpNote note;
    for (int i = 0; l->kind == COMM_TCP && i < l->size; i++) {
        if (tcp_read_note(&l->tcp, blamed.rank, &note, 1.0) != 1 || note.rank == l->rank) { break; }
        int of_itself = note.rank == blamed.rank;
        blamed = note;
        if (of_itself) { break; }
    }
    comm_stop_(l, call, blamed);
}

__attribute__((noreturn))
static inline void comm_lost_(CommLink* l, const CommCall* call, int peer) {
    TcpNote gone = {peer, 1, 0, "is gone (killed, or its machine is)"};
    comm_blame_(l, call, gone);
}

// a process that ends by itself with an error tells the others; after comm_free there is nobody to tell
static inline void comm_at_exit_(int status, void* link) {
    CommLink* l = (CommLink*)link;
    TcpNote note = {l->rank, status, l->said, ""};
    if (l->kind == COMM_NONE) { return; }
    snprintf(note.text, sizeof note.text, "stopped with status %d (its own message says why)", status);
    if (l->kind == COMM_TCP && status != 0 && !l->is_failing) { tcp_leave_note(&l->tcp, &note); }
    if (l->leave && status != 0) { l->leave(l, 1); }
#ifdef USE_MPI
    if (l->kind == COMM_MPI && status != 0) { MPI_Abort(MPI_COMM_WORLD, status); }
    if (l->kind == COMM_MPI && status == 0) { mpi_finalize(l->timeout); }
#endif
}

// Failure.is_said_elsewhere: does a lower rank say this line? Its note tells. A rank that waits for us hears that we
// stop, and leaves a note too. Over MPI there are no notes: rank 0 ends the job meanwhile if it has an error of its
// own.
static inline int comm_is_said_(void* link, const char* line) {
    CommLink* l = (CommLink*)link;
    const double deadline = seconds_now(CLOCK_MONOTONIC) + l->patience;
    l->said = tcp_hash_(line);
    if (l->kind == COMM_NONE || l->rank == 0) { return 0; }
    if (l->kind == COMM_MPI) {
        usleep((useconds_t)(1e6 * l->patience));
        return 0;
    }
    TcpNote note = {l->rank, 2, l->said, "stopped with status 2 (its own message says why)"};
    l->is_failing = 1;
    tcp_leave_note(&l->tcp, &note);
    tcp_hang_up(&l->tcp);
    for (int i = 0; i < l->rank; i++) {
        const double left = deadline - seconds_now(CLOCK_MONOTONIC);
        const int has_note = tcp_read_note(&l->tcp, i, &note, left > 0.0 ? left : 0.0) == 1;
        if (has_note && note.rank == i && note.said == l->said) { return 1; }
    }
    return 0;
}

// 0: all ranks are there as far as is known; else 1 + the rank that is not. Never waits.
static inline int comm_health(Comm* c) {
    CommLink* l = c->link;
    for (int i = 0; l->kind == COMM_TCP && i < l->size; i++) {
        if (i != l->rank && tcp_ready_(l->tcp.control[i], POLLIN, 0.0)) { return 1 + i; }
    }
    return 0;
}

// between calls, in long work: stops like a call would when a rank is gone. Never waits.
static inline void comm_watch(Comm* c, const char* where) {
    int lost = comm_health(c) - 1;
    CommCall here = {"its own work", where, 0, NULL, 0, 0, 0.0, 0.0};
    if (lost >= 0) { comm_lost_(c->link, &here, lost); }
}

// ---- 2. Moving bytes ----

static inline CommCall* comm_call_(CommLink* l, uint64_t seq) { return &l->call[seq % COMM_CALLS]; }

// bytes of `head` and of what follows it that have gone now; MPI needs no head, for it knows where a message ends
static inline ssize_t comm_send_some_(CommLink* l, int peer, CommHeadPart* head, const CommPiece* p) {
#ifdef USE_MPI
    if (l->kind == COMM_MPI) {
        head->n = sizeof head->head;
        return mpi_send(&l->mpi, peer, p->send, p->n_send);
    }
#endif
    return tcp_send(&l->tcp, peer, (char*)&head->head + head->n, sizeof head->head - head->n, p->send, p->n_send);
}

static inline ssize_t comm_recv_some_(CommLink* l, int peer, CommHeadPart* head, const CommPiece* p) {
#ifdef USE_MPI
    if (l->kind == COMM_MPI) {
        head->n = sizeof head->head;
        return mpi_recv(&l->mpi, peer, p->recv, p->n_recv);
    }
#endif
    return tcp_recv(&l->tcp, peer, (char*)&head->head + head->n, sizeof head->head - head->n, p->recv, p->n_recv);
}

// of n bytes that have moved, those that belong to the head; it may have become whole
static inline size_t comm_head_moved_(CommHeadPart* head, size_t n) {
    const size_t left = sizeof head->head - head->n, of_head = n < left ? n : left;
    head->n += of_head;
    return of_head;
}

// is what comes from this rank what the call expects?
static inline void comm_check_head_(const CommLink* l, const CommCall* call, int peer, const CommHead* head, size_t n) {
    if (head->call == call->id && head->n_bytes == n) { return; }
    const char* other = head->call == call->id ? "of it" : "of another call";
    fail_run("rank %d expects %zu bytes of %s (%s) from rank %d, but found %llu %s: a broken connection, or a mistake "
             "in this program (COMM_CHECK=1 finds it)", l->rank, n, call->name, call->where, peer,
             (unsigned long long)head->n_bytes, other);
}

static inline void comm_piece_done_(CommCall* call) {
    if (--call->n_open == 0) { call->done = seconds_now(CLOCK_MONOTONIC); }
}

// as much as goes to one rank without waiting; returns whether anything moved
static inline int comm_push_(CommLink* l, int peer) {
    int moved = 0;
    CommHeadPart* head = &l->head_out[peer];
    while (l->sending[peer] < l->n_calls) {
        CommCall* call = comm_call_(l, l->sending[peer]);
        CommPiece* p = &call->piece[peer];
        if (head->n == 0) {
            head->head.call = call->id;
            head->head.n_bytes = p->n_send;
        }
        ssize_t n = p->n_send > 0 ? comm_send_some_(l, peer, head, p) : 0;
        if (n < 0) { comm_lost_(l, call, peer); }
        if (n == 0 && p->n_send > 0) { break; }
        n -= (ssize_t)comm_head_moved_(head, (size_t)n);
        p->send = (const char*)p->send + n;
        p->n_send -= (size_t)n;
        moved = 1;
        if (p->n_send > 0) { continue; }
        l->sending[peer]++;
        head->n = 0;
        comm_piece_done_(call);
    }
    return moved;
}

static inline int comm_pull_(CommLink* l, int peer) {
    int moved = 0;
    CommHeadPart* head = &l->head_in[peer];
    while (l->receiving[peer] < l->n_calls) {
        CommCall* call = comm_call_(l, l->receiving[peer]);
        CommPiece* p = &call->piece[peer];
        const size_t n_before = head->n;
        ssize_t n = p->n_recv > 0 ? comm_recv_some_(l, peer, head, p) : 0;
        if (n < 0) { comm_lost_(l, call, peer); }
        if (n == 0 && p->n_recv > 0) { break; }
        n -= (ssize_t)comm_head_moved_(head, (size_t)n);
        const int is_whole = l->kind == COMM_TCP && n_before < sizeof head->head && head->n == sizeof head->head;
        if (is_whole && p->n_recv > 0) { comm_check_head_(l, call, peer, &head->head, p->n_recv); }
        p->recv = (char*)p->recv + n;
        p->n_recv -= (size_t)n;
        moved = 1;
        if (p->n_recv > 0) { continue; }
        l->receiving[peer]++;
        head->n = 0;
        comm_piece_done_(call);
    }
    return moved;
}

static inline int comm_progress_(CommLink* l) {
    int moved = 0;
    for (int i = 0; i < l->size; i++) {
        if (i != l->rank) { moved |= comm_push_(l, i) | comm_pull_(l, i); }
    }
    return moved;
}

// sleep until a byte may move, at most 0.1 s
static inline void comm_idle_(CommLink* l, int moved) {
    int n = 0;
#ifdef USE_MPI
    if (l->kind == COMM_MPI) {
        mpi_idle(&l->mpi, moved);
        return;
    }
#endif
    for (int i = 0; !moved && i < l->size; i++) {
        int events = (l->sending[i] < l->n_calls ? POLLOUT : 0) | (l->receiving[i] < l->n_calls ? POLLIN : 0);
        if (i == l->rank || events == 0) { continue; }
        l->polled[n].fd = l->tcp.data[i];
        l->polled[n++].events = (short)events;
    }
    if (n > 0) { poll(l->polled, (nfds_t)n, 100); }
}

// nothing has moved for the time limit: name those that this call still waits for
__attribute__((noreturn))
static inline void comm_time_out_(CommLink* l, uint64_t seq) {
    int late = -1;
    TcpNote note;
    for (int i = 0; i < l->size; i++) {
        if (i != l->rank && l->receiving[i] <= seq) { late = i; }
    }
    for (int i = 0; late < 0 && i < l->size; i++) {
        if (i != l->rank && l->sending[i] <= seq) { late = i; }
    }
    note.rank = late;
    note.status = 1;
    note.said = 0;
    snprintf(note.text, sizeof note.text, "has not answered for %.0f s (--comm-timeout)", l->timeout);
    if (l->kind == COMM_TCP) { tcp_leave_note(&l->tcp, &note); }  // for those who wait for us
    comm_blame_(l, comm_call_(l, seq), note);
}

static inline int comm_is_done_(const CommLink* l, uint64_t seq) {
    return seq + COMM_CALLS < l->n_calls || l->call[seq % COMM_CALLS].n_open == 0;
}

static inline void comm_finish_(CommLink* l, uint64_t seq) {
    if (comm_is_done_(l, seq)) { return; }
    double begun = seconds_now(CLOCK_MONOTONIC), last = begun;
    while (!comm_is_done_(l, seq)) {
        int moved = comm_progress_(l);
        double now = seconds_now(CLOCK_MONOTONIC);
        if (moved) { last = now; }
        if (now - last > l->timeout) { comm_time_out_(l, seq); }
        if (!comm_is_done_(l, seq)) { comm_idle_(l, moved); }
    }
    l->seconds_waited += seconds_now(CLOCK_MONOTONIC) - begun;
}

// the buffers of the call belong to the caller again
static inline void comm_wait(Comm* c, CommTicket ticket) {
    if (c->link->kind != COMM_NONE) { comm_finish_(c->link, ticket.seq); }
}

// c->piece as a call of all ranks in the group; zero pieces to all others of the world
static inline uint64_t comm_begin_(Comm* c, const char* name, uint64_t id, const char* where) {
    CommLink* l = c->link;
    uint64_t seq = l->n_calls;
    CommCall* call = comm_call_(l, seq);
    if (seq >= COMM_CALLS) { comm_finish_(l, seq - COMM_CALLS); }  // its place is needed
    memset(call->piece, 0, sizeof(CommPiece) * (size_t)l->size);
    call->name = name;
    call->where = where;
    call->id = id;
    call->n_open = 2 * (l->size - 1);
    call->n_bytes = 0;
    call->begun = seconds_now(CLOCK_MONOTONIC);
    for (int i = 0; i < c->size; i++) {
        call->piece[c->members[i]] = c->piece[i];
        if (i != c->rank) { call->n_bytes += c->piece[i].n_send; }
    }
    l->bytes_sent += call->n_bytes;
    l->n_calls++;
    comm_progress_(l);
    return seq;
}

// ---- 3. COMM_CHECK: is everybody about to do the same? ----

static inline void comm_describe_(char* text, size_t n_text, const CommDescription* d) {
    const char* types[] = {"f32", "f64", "i32", "i64", "u8"};
    snprintf(text, n_text, "%s of %llu %s (op %d, group %d, call %llu, %llu bytes to the other) at %s", d->name,
             (unsigned long long)d->count, types[d->type], d->op, d->group, (unsigned long long)d->seq,
             (unsigned long long)d->n_bytes, d->where);
}

// what came from another rank, so that it can be shown whatever it is
static inline void comm_bound_(CommDescription* d) {
    d->name[sizeof d->name - 1] = d->where[sizeof d->where - 1] = '\0';
    if (d->type < 0 || d->type > DT_U8) { d->type = DT_U8; }
}

static inline void comm_check_(Comm* c, const char* name, CommType type, int op, uint64_t count, const char* where) {
    const size_t n_bytes = sizeof(CommDescription);
    CommDescription* mine = (CommDescription*)calloc(2 * (size_t)c->size, n_bytes);
    CommPiece* wanted = (CommPiece*)malloc_check(sizeof(CommPiece) * (size_t)c->size, "pieces");
    if (!mine) { fail_run("no memory for descriptions"); }
    CommDescription* theirs = mine + c->size;
    memcpy(wanted, c->piece, sizeof(CommPiece) * (size_t)c->size);
    for (int i = 0; i < c->size; i++) {
        snprintf(mine[i].name, sizeof mine[i].name, "%s", name);
        snprintf(mine[i].where, sizeof mine[i].where, "%s", where);
        mine[i].type = type;
        mine[i].op = op;
        mine[i].group = c->group;
        mine[i].seq = c->n_calls;
        mine[i].count = count;
        mine[i].n_bytes = wanted[i].n_send;
        CommPiece piece = {&mine[i], &theirs[i], i == c->rank ? 0 : n_bytes, i == c->rank ? 0 : n_bytes};
        c->piece[i] = piece;
    }
    comm_finish_(c->link, comm_begin_(c, name, tcp_hash_("COMM_CHECK"), where));  // whatever the call will be
    for (int i = 0; i < c->size; i++) {
        comm_bound_(&theirs[i]);
        CommDescription a = mine[i], b = theirs[i];
        a.n_bytes = b.n_bytes = 0;
        if (i == c->rank || (memcmp(&a, &b, n_bytes) == 0 && theirs[i].n_bytes == wanted[i].n_recv)) { continue; }
        char ours[256], others[256];
        comm_describe_(ours, sizeof ours, &mine[i]);
        comm_describe_(others, sizeof others, &theirs[i]);
        fail_run("COMM_CHECK: rank %d: %s, expecting %zu bytes; rank %d: %s", c->members[c->rank], ours,
                 wanted[i].n_recv, c->members[i], others);
    }
    memcpy(c->piece, wanted, sizeof(CommPiece) * (size_t)c->size);
    free(wanted);
    free(mine);
}

// ---- 4. The calls ----

static inline CommTicket comm_issue_(Comm* c, const char* name, CommType type, int op, uint64_t count,
                                     const char* where) {
    CommTicket ticket = {0};
    CommPiece* own = &c->piece[c->rank];
    if (own->n_recv > 0 && own->recv != own->send) { memcpy(own->recv, own->send, own->n_recv); }
    if (c->link->kind != COMM_NONE && !comm_is_plan(c)) {
        if (c->link->check) { comm_check_(c, name, type, op, count, where); }
        const uint64_t id = tcp_hash_(name) ^ (uint64_t)c->group << 40 ^ c->n_calls;
        ticket.seq = comm_begin_(c, name, id, where);
    }
    c->n_calls++;
    return ticket;
}

// pieces: one for each rank of the group; our own is copied
static inline CommTicket comm_exchange(Comm* c, const CommPiece* pieces, const char* where) {
    memcpy(c->piece, pieces, sizeof(CommPiece) * (size_t)c->size);
    return comm_issue_(c, "exchange", DT_U8, 0, 0, where);
}

// rank r's n_in elements come to out + r * n_in; in place: in == out + rank * n_in
static inline CommTicket comm_all_gather(Comm* c, const void* in, void* out, size_t n_in, CommType type,
                                         const char* where) {
    const size_t n_bytes = n_in * comm_type_bytes(type);
    for (int i = 0; i < c->size; i++) {
        CommPiece piece = {in, (char*)out + (size_t)i * n_bytes, n_bytes, n_bytes};
        c->piece[i] = piece;
        if (comm_is_plan(c) && piece.recv != in) { memcpy(piece.recv, in, n_bytes); }
    }
    return comm_issue_(c, "all_gather", type, 0, n_in, where);
}

// n things dealt out in order (elements, leaves, chunks): rank r has number comm_share(n, r, P) .. comm_share(n, r + 1,
// P) - 1
static inline int64_t comm_share(int64_t n, int rank, int size) { return n / size * rank + n % size * rank / size; }

typedef struct {
    int first, end;  // this rank's of n things: first .. end - 1
} CommShare;

static inline CommShare comm_own(const Comm* c, int n) {
    CommShare own = {(int)comm_share(n, c->rank, c->size), (int)comm_share(n, c->rank + 1, c->size)};
    return own;
}

// parts of different sizes, one after the other; our own part lies in its place already
static inline CommTicket comm_all_gather_v(Comm* c, void* inout, const size_t* counts, CommType type,
                                           const char* where) {
    const size_t bytes = comm_type_bytes(type);
    size_t first = 0, to = 0;
    for (int i = 0; i < c->rank; i++) { first += counts[i] * bytes; }
    for (int i = 0; i < c->size; i++) {
        CommPiece piece = {(char*)inout + first, (char*)inout + to, counts[c->rank] * bytes, counts[i] * bytes};
        c->piece[i] = piece;
        to += counts[i] * bytes;
    }
    return comm_issue_(c, "all_gather_v", type, 0, 0, where);
}

// n elements of which every rank has filled its share come to all
static inline void comm_all_gather_shares(Comm* c, void* inout, int64_t n, CommType type, const char* where) {
    if (c->size == 1) { return; }
    size_t* counts = (size_t*)malloc_check(sizeof(size_t) * (size_t)c->size, "shares");
    for (int i = 0; i < c->size; i++) {
        counts[i] = (size_t)(comm_share(n, i + 1, c->size) - comm_share(n, i, c->size));
    }
    comm_wait(c, comm_all_gather_v(c, inout, counts, type, where));
    free(counts);
}

// to, from: ranks of the group, -1 for nobody; all ranks of the group call
static inline CommTicket comm_send_recv(Comm* c, const void* out, size_t n_out, int to, void* in, size_t n_in, int from,
                                        CommType type, const char* where) {
    const size_t bytes = comm_type_bytes(type);
    memset(c->piece, 0, sizeof(CommPiece) * (size_t)c->size);
    if (to >= 0) {
        c->piece[to].send = out;
        c->piece[to].n_send = n_out * bytes;
    }
    if (from >= 0) {
        c->piece[from].recv = in;
        c->piece[from].n_recv = n_in * bytes;
    }
    return comm_issue_(c, "send_recv", type, 0, 0, where);
}

static inline CommTicket comm_broadcast(Comm* c, void* buf, size_t n, CommType type, int root, const char* where) {
    const size_t n_bytes = n * comm_type_bytes(type);
    for (int i = 0; i < c->size; i++) {
        int sends = c->rank == root && i != root, receives = i == root && c->rank != root;
        CommPiece piece = {buf, buf, sends ? n_bytes : 0, receives ? n_bytes : 0};
        c->piece[i] = piece;
    }
    return comm_issue_(c, "broadcast", type, root, n, where);
}

static inline void comm_barrier(Comm* c, const char* where) {
    unsigned char byte = 1, all[1];
    for (int i = 0; i < c->size; i++) {
        CommPiece piece = {&byte, all, i != c->rank, i != c->rank};
        c->piece[i] = piece;
    }
    comm_wait(c, comm_issue_(c, "barrier", DT_U8, 0, 0, where));
}

// ---- 5. Reductions, in the order of ranks ----

static inline unsigned char* comm_scratch_(CommLink* l, size_t n_bytes) {
    if (l->n_scratch < n_bytes) {
        l->scratch = (unsigned char*)realloc_check(l->scratch, n_bytes, "scratch of a reduction");
        l->n_scratch = n_bytes;
    }
    return l->scratch;
}

#define COMM_COMBINE_(T)                                                                                              \
    for (size_t i = 0; i < n; i++) {                                                                                  \
        const T a = ((T*)sum)[i], b = ((const T*)x)[i];                                                               \
        ((T*)sum)[i] = op == OP_SUM ? (T)(a + b) : (op == OP_MAX ? a > b : a < b) ? a : b;                            \
    }

static inline void comm_combine_(void* sum, const void* x, size_t n, CommType type, CommOp op) {
    switch (type) {
        case DT_F32: COMM_COMBINE_(float) break;
        case DT_F64: COMM_COMBINE_(double) break;
        case DT_I32: COMM_COMBINE_(int32_t) break;
        case DT_I64: COMM_COMBINE_(int64_t) break;
        case DT_U8: COMM_COMBINE_(uint8_t) break;
    }
}
#undef COMM_COMBINE_

// what all ranks together have where each has the same
static inline void comm_combine_alike_(const Comm* c, void* buf, size_t n, CommType type, CommOp op) {
    const size_t n_bytes = n * comm_type_bytes(type);
    void* own = memcpy(malloc_check(n_bytes, "a plan"), buf, n_bytes);
    for (int i = 1; i < c->size; i++) { comm_combine_(buf, own, n, type, op); }
    free(own);
}

// part i of `in` from every rank goes to rank i, which adds them; out may be our own part of in
static inline void comm_reduce_part_(Comm* c, const char* in, char* out, const size_t* first, CommType type, CommOp op,
                                     const char* name, uint64_t count, const char* where) {
    const size_t bytes = comm_type_bytes(type), n_own = first[c->rank + 1] - first[c->rank];
    unsigned char* got = comm_scratch_(c->link, n_own * bytes * (size_t)c->size);
    for (int i = 0; i < c->size; i++) {
        CommPiece piece = {in + first[i] * bytes, got + (size_t)i * n_own * bytes, (first[i + 1] - first[i]) * bytes,
                           n_own * bytes};
        c->piece[i] = piece;
    }
    comm_wait(c, comm_issue_(c, name, type, op, count, where));
    for (int i = 1; i < c->size; i++) { comm_combine_(got, got + (size_t)i * n_own * bytes, n_own, type, op); }
    if (n_own > 0) { memcpy(out, got, n_own * bytes); }
}

static inline void comm_all_reduce(Comm* c, void* buf, size_t n, CommType type, CommOp op, const char* where) {
    if (c->size == 1) { return; }
    if (comm_is_plan(c)) {
        comm_combine_alike_(c, buf, n, type, op);
        return;
    }
    const size_t bytes = comm_type_bytes(type);
    size_t *first = (size_t*)malloc_check(sizeof(size_t) * (2 * (size_t)c->size + 1), "parts"),
           *counts = first + c->size + 1;
    for (int i = 0; i <= c->size; i++) { first[i] = (size_t)comm_share((int64_t)n, i, c->size); }
    for (int i = 0; i < c->size; i++) { counts[i] = first[i + 1] - first[i]; }
    comm_reduce_part_(c, (const char*)buf, (char*)buf + first[c->rank] * bytes, first, type, op, "all_reduce", n,
                      where);
    comm_wait(c, comm_all_gather_v(c, buf, counts, type, where));
    free(first);
}

// ---- 6. Groups, the world, the end ----

static inline Comm* comm_group_(CommLink* l, int number, const int* members, int size) {
    Comm* c = (Comm*)malloc_check(sizeof(Comm), "group of ranks");
    memset(c, 0, sizeof *c);
    c->link = l;
    c->size = size;
    c->group = number;
    l->n_groups = number + 1;
    c->members = (int*)malloc_check(sizeof(int) * (size_t)size, "group of ranks");
    c->piece = (CommPiece*)malloc_check(sizeof(CommPiece) * (size_t)size, "group of ranks");
    for (int i = 0; i < size; i++) {
        c->members[i] = members[i];
        if (members[i] == l->rank) { c->rank = i; }
    }
    return c;
}

// The ranks first, first + step, ... of c, `size` of them with this one, become a group. All ranks of c call, and no
// two groups of one call share a rank. Its number is one that none of them has used: some may have made more groups
static inline Comm* comm_every(Comm* c, int first, int step, int size, const char* where) {
    int number = c->link->n_groups;
    int* members = (int*)malloc_check(sizeof(int) * (size_t)size, "group of ranks");
    comm_all_reduce(c, &number, 1, DT_I32, OP_MAX, where);
    for (int i = 0; i < size; i++) { members[i] = c->members[first + i * step]; }
    Comm* group = comm_group_(c->link, number, members, size);
    free(members);
    return group;
}

// connections for the kind that the start and the build allow
static inline void comm_connect_(CommLink* l, const RankPlace* place, double init_timeout) {
    l->kind = place->size == 1 ? COMM_NONE : place->is_plan ? COMM_PLAN : COMM_TCP;
    if (l->kind == COMM_TCP && !*place->host) {
#ifdef USE_MPI
        l->kind = COMM_MPI;
        mpi_open(&l->mpi, init_timeout);
        if (l->mpi.rank != place->rank || l->mpi.size != place->size) {
            fail_input("%s says rank %d of %d, MPI says rank %d of %d: was this program built with another MPI than "
                       "mpirun's?", place->source, place->rank, place->size, l->mpi.rank, l->mpi.size);
        }
#else
        fail_input("started as rank %d of %d by %s, but this build has no MPI: make %s MPI=1, or say where rank 0 "
                   "listens by MASTER_ADDR and MASTER_PORT", place->rank, place->size, place->source,
                   program_invocation_short_name);
#endif
    }
    if (l->kind == COMM_TCP) { tcp_open(&l->tcp, place, init_timeout); }
}

// timeout: seconds without a byte after which a call is given up; init_timeout: for all ranks to come
static inline Comm* comm_world(const RankPlace* place, double timeout, double init_timeout) {
    CommLink* l = (CommLink*)calloc(1, sizeof(CommLink));
    const size_t size = (size_t)place->size;
    const char* check = getenv("COMM_CHECK");
    if (!l) { fail_run("no memory for the connections"); }
    l->rank = place->rank;
    l->size = place->size;
    l->source = place->source;
    l->timeout = timeout;
    l->patience = 3.0;  // less than launch's, after which it kills
    l->check = check && strcmp(check, "1") == 0;
    comm_connect_(l, place, init_timeout);
    l->sending = (uint64_t*)calloc(2 * size, sizeof(uint64_t));
    l->head_out = (CommHeadPart*)calloc(2 * size, sizeof(CommHeadPart));
    l->polled = (struct pollfd*)calloc(size, sizeof(struct pollfd));
    CommPiece* pieces = (CommPiece*)calloc(COMM_CALLS * size, sizeof(CommPiece));
    int* members = (int*)malloc_check(sizeof(int) * size, "ranks");
    if (!l->sending || !l->head_out || !l->polled || !pieces) {
        fail_run("no memory for the calls of %zu ranks", size);
    }
    l->receiving = l->sending + size;
    l->head_in = l->head_out + size;
    for (int i = 0; i < COMM_CALLS; i++) { l->call[i].piece = pieces + (size_t)i * size; }
    for (int i = 0; i < place->size; i++) { members[i] = i; }
    Comm* world = comm_group_(l, 0, members, place->size);
    free(members);
    on_exit(comm_at_exit_, l);
    failure_()->is_said_elsewhere = comm_is_said_;
    failure_()->context = l;
    return world;
}

// a group; for the world also the connections, when all ranks have come here
static inline void comm_free(Comm* c) {
    CommLink* l = c->link;
    if (c->group == 0) {
        comm_barrier(c, HERE);
        if (l->leave) { l->leave(l, 0); }
        if (l->kind == COMM_TCP) { tcp_close(&l->tcp); }
#ifdef USE_MPI
        if (l->kind == COMM_MPI) { mpi_close(&l->mpi, l->timeout); }
#endif
        free(l->call[0].piece);
        free(l->sending);
        free(l->head_out);
        free(l->polled);
        free(l->scratch);
        memset(l, 0, sizeof *l);  // stays until the process ends: comm_at_exit_ looks at it
    }
    free(c->members);
    free(c->piece);
    free(c);
}
#endif  // LLMC_COMM_H
