/*
Ranks over MPI (make MPI=1): bytes between any two processes, by MPI_Isend and MPI_Irecv alone. Sums are made by comm.h,
so no result depends on the library. Between two ranks there is at most one message under way in each direction; a long
one goes in pieces of 1 GiB, which an MPI count can hold. MPI keeps the order of messages between two ranks, so one tag
is enough.
Errors: MPI's own handler ends the whole job; a rank that stops by itself calls MPI_Abort with its status. MPI waits
without a limit for all ranks to begin and to end, so an alarm ends a process that does so for too long,
and mpirun the others.
*/
#ifndef LLMC_COMM_MPI_H
#define LLMC_COMM_MPI_H
#ifdef USE_MPI
#include "../core/fail.h"
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

enum { MPI_PIECE_BYTES = 1 << 30, MPI_TAG = 1 };

typedef struct {
    int rank, size;
    MPI_Request *sending, *receiving;  // one for each rank, MPI_REQUEST_NULL when nothing is under way
    int n_idle;                        // looks in a row at which nothing had moved
} MpiMesh;

// what the alarm says; a state of the process, as its alarm is
static inline char* mpi_late_text_(void) {
    static char text[300];
    return text;
}

static inline void mpi_late_(int signal_number) {
    const ssize_t n = write(2, mpi_late_text_(), strlen(mpi_late_text_()));
    (void)n, (void)signal_number;
    _exit(1);
}

// from here to alarm(0) there are so many seconds
static inline void mpi_limit_(const char* call, double seconds, const char* option) {
    struct sigaction late;
    memset(&late, 0, sizeof late);
    late.sa_handler = mpi_late_;
    snprintf(mpi_late_text_(), 300, "%.100s: %s has not returned for %.0f s (%s): a rank is stuck\n",
             program_invocation_short_name, call, seconds, option);
    sigaction(SIGALRM, &late, NULL);
    alarm((unsigned)seconds);
}

static inline void mpi_open(MpiMesh* m, double init_timeout) {
    int given;
    mpi_limit_("MPI_Init", init_timeout, "--init-timeout");
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &given) != MPI_SUCCESS) { fail_run("MPI_Init_thread failed"); }
    alarm(0);
    memset(m, 0, sizeof *m);
    MPI_Comm_rank(MPI_COMM_WORLD, &m->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &m->size);
    m->sending = (MPI_Request*)malloc_check(2 * sizeof(MPI_Request) * (size_t)m->size, "requests");
    m->receiving = m->sending + m->size;
    for (int i = 0; i < 2 * m->size; i++) { m->sending[i] = MPI_REQUEST_NULL; }
}

static inline void mpi_finalize(double timeout) {
    mpi_limit_("MPI_Finalize", timeout, "--comm-timeout");
    MPI_Finalize();
    alarm(0);
}

static inline void mpi_close(MpiMesh* m, double timeout) {
    mpi_finalize(timeout);
    free(m->sending);
}

static inline int mpi_piece_(size_t n_bytes) { return n_bytes < MPI_PIECE_BYTES ? (int)n_bytes : (int)MPI_PIECE_BYTES; }

// bytes that have gone since the last call, 0 while they are under way; called again with the same arguments until then
static inline ssize_t mpi_send(MpiMesh* m, int peer, const void* data, size_t n_bytes) {
    int done = 0;
    MPI_Request* request = &m->sending[peer];
    if (*request == MPI_REQUEST_NULL) {
        MPI_Isend(data, mpi_piece_(n_bytes), MPI_BYTE, peer, MPI_TAG, MPI_COMM_WORLD, request);
    }
    MPI_Test(request, &done, MPI_STATUS_IGNORE);
    return done ? mpi_piece_(n_bytes) : 0;
}

static inline ssize_t mpi_recv(MpiMesh* m, int peer, void* data, size_t n_bytes) {
    int done = 0;
    MPI_Request* request = &m->receiving[peer];
    if (*request == MPI_REQUEST_NULL) {
        MPI_Irecv(data, mpi_piece_(n_bytes), MPI_BYTE, peer, MPI_TAG, MPI_COMM_WORLD, request);
    }
    MPI_Test(request, &done, MPI_STATUS_IGNORE);
    return done ? mpi_piece_(n_bytes) : 0;
}

// nothing moved: let another process have the core, after a while sleep
static inline void mpi_idle(MpiMesh* m, int moved) {
    struct timespec pause = {0, 50000};
    m->n_idle = moved ? 0 : m->n_idle + 1;
    if (m->n_idle > 2000) { nanosleep(&pause, NULL); } else if (m->n_idle > 0) { sched_yield(); }
}
#endif
#endif  // LLMC_COMM_MPI_H
