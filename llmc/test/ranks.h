/*
Ranks of a test: forked processes that talk over TCP on this machine.
    run_ranks      a function on so many ranks, all of which must end well
    device_ranks   as far as there are GPUs, or without CUDA any number; rank_device, that of a rank
    start_rank, end_ranks, place_at, free_port   one by one, for tests of what goes wrong
*/
#ifndef LLMC_TEST_RANKS_H
#define LLMC_TEST_RANKS_H
#include "../ranks/comm_launch.h"  // RankPlace
#include "../ranks/comm_nccl.h"    // comm_world; comm_device_open for the tests
#include "test.h"
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>

#ifdef __CUDACC__
enum { MAX_TEST_RANKS = 8, DEVICE_MEETS = 1 };
#else
enum { MAX_TEST_RANKS = 8, DEVICE_MEETS = 0 };  // do ranks meet once more, for exchanges of device memory?
#endif

typedef void (*RankFunction)(Test* t, Comm* c, int number);

typedef struct {
    int n;
    pid_t pid[MAX_TEST_RANKS];
    FILE* error[MAX_TEST_RANKS];      // what a rank writes to stderr
    int status[MAX_TEST_RANKS];       // of exit, or 128 + signal
    char text[MAX_TEST_RANKS][2048];  // its stderr
} Ranks;

static inline int free_port(void) {
    struct sockaddr_in address;
    socklen_t n_bytes = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int bound = bind(fd, (struct sockaddr*)&address, n_bytes) == 0 &&
                getsockname(fd, (struct sockaddr*)&address, &n_bytes) == 0;
    if (!bound) { fail_run("no free port: %s", strerror(errno)); }
    close(fd);
    return ntohs(address.sin_port);
}

static inline RankPlace place_at(int rank, int size, int port) {
    RankPlace p = {rank, size, rank, size, "the test", "127.0.0.1", port, "run", "known to the ranks of this test", 0};
    return p;
}

// one more process, which runs f as the rank that `place` says
static inline void start_rank(Ranks* r, RankPlace place, double timeout, double init_timeout, RankFunction f,
                              int number) {
    int i = r->n++;
    fflush(stdout);
    r->error[i] = tmpfile();
    r->pid[i] = fork();
    if (r->pid[i] != 0) { return; }
    Test t = {0, NULL};
    dup2(fileno(r->error[i]), 2);
    Comm* c = comm_world(&place, timeout, init_timeout);
    f(&t, c, number);
    comm_free(c);
    exit(t.n_failures > 0 ? 77 : 0);
}

// wait for all and read what they said
static inline void end_ranks(Ranks* r) {
    for (int i = 0; i < r->n; i++) {
        int state;
        waitpid(r->pid[i], &state, 0);
        r->status[i] = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
        rewind(r->error[i]);
        size_t n = fread(r->text[i], 1, sizeof r->text[i] - 1, r->error[i]);
        r->text[i][n] = '\0';
        fclose(r->error[i]);
    }
}

// f on `size` ranks; all must end well
static inline void run_ranks(Test* t, int size, RankFunction f, int number) {
    Ranks r;
    r.n = 0;
    int port = free_port();
    for (int rank = 0; rank < size; rank++) { start_rank(&r, place_at(rank, size, port), 120.0, 120.0, f, number); }
    end_ranks(&r);
    for (int i = 0; i < size; i++) {
        check(t, r.status[i] == 0, "rank %d of %d: status %d: %s", i, size, r.status[i], r.text[i]);
    }
}

// f on 1 .. `most` ranks that exchange device memory, as far as there are GPUs. A child counts them: what CUDA has
// begun in this process would not work in the ranks
static inline int device_ranks(Test* t, int most) {
#ifdef __CUDACC__
    int state, n_gpus = 0;
    pid_t child = fork();
    if (child == 0) { _exit(cudaGetDeviceCount(&n_gpus) == cudaSuccess ? n_gpus : 0); }
    waitpid(child, &state, 0);
    n_gpus = WEXITSTATUS(state);
    if (n_gpus < most) { skip(t, "fewer GPUs than ranks"); }
    return n_gpus < most ? n_gpus : most;
#else
    (void)t;
    return most;
#endif
}

// the GPU of this rank
static inline Device rank_device(const Comm* c) {
    device_choose(c->rank);
    return test_device(1);
}
#endif  // LLMC_TEST_RANKS_H
