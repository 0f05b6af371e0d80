/*
Starts P ranks of a trainer on this machine and behaves like one program.
    make launch && ./launch -n 4 ./train_gpt2 --train book.txt --model tiny
Each process gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), a run
id and LLMC_SECRET, which is drawn anew in each start and which ranks prove to know when they meet; variables of other
launchers are taken away. Rank 0 keeps the terminal; lines of the others say "[rank 2]".
SIGINT, SIGTERM, SIGUSR1 and SIGHUP go on to all ranks. When one fails, the others have 5 s to say so and are then
killed. When launch itself is killed they get SIGTERM.
Status: 0 when all ranks end with 0, else that of the first that failed (128 + the signal for one that was killed).
*/
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 1024, LINE_BYTES = 4096, GRACE_SECONDS = 5 };

typedef struct {
    pid_t pid;          // 0: has ended
    int out;            // what it prints, -1: closed, or the terminal itself
    char line[LINE_BYTES];
    size_t n;           // bytes of the line that is not complete
} Child;

static Child children[MAX_RANKS];
static int n_ranks;

static void fail(const char* what, const char* why) {
    fprintf(stderr, "launch: %s: %s\n", what, why);
    exit(2);
}

// of a clock that nobody sets
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void forward(int signal_number) {
    int error = errno;
    for (int i = 0; i < n_ranks; i++) {
        if (children[i].pid > 0) { kill(children[i].pid, signal_number); }
    }
    errno = error;
}

// A port for rank 0. We stay bound to it, without listening, so that the system gives it to nobody else; rank 0 may
// listen there all the same, for both say SO_REUSEADDR.
static int free_port(void) {
    struct sockaddr_in address;
    socklen_t n_bytes = sizeof address;
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
        bind(fd, (struct sockaddr*)&address, n_bytes) != 0 ||
        getsockname(fd, (struct sockaddr*)&address, &n_bytes) != 0) {
        fail("no free port", strerror(errno));
    }
    return ntohs(address.sin_port);
}

static void set_number(const char* name, long number) {
    char text[32];
    snprintf(text, sizeof text, "%ld", number);
    setenv(name, text, 1);
}

// in the environment, which only this user can read, and not among the arguments, which everybody can
static void set_secret(void) {
    unsigned char bytes[32];
    char text[2 * sizeof bytes + 1];
    if (getentropy(bytes, sizeof bytes) != 0) { fail("random numbers for LLMC_SECRET", strerror(errno)); }
    for (size_t i = 0; i < sizeof bytes; i++) { snprintf(text + 2 * i, 3, "%02x", bytes[i]); }
    setenv("LLMC_SECRET", text, 1);
}

// what all ranks share; -n 4 on 8 cores makes 2 threads each
static void set_environment(void) {
    const char* others[] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID",
                            "SLURM_STEP_ID"};
    long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    char id[64];
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) { unsetenv(others[i]); }
    set_number("WORLD_SIZE", n_ranks);
    set_number("LOCAL_WORLD_SIZE", n_ranks);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", free_port());
    snprintf(id, sizeof id, "launch-%ld-%ld", (long)getpid(), (long)time(NULL));
    setenv("TORCHELASTIC_RUN_ID", id, 1);
    set_secret();
    if (!getenv("OMP_NUM_THREADS")) { set_number("OMP_NUM_THREADS", n_cores > n_ranks ? n_cores / n_ranks : 1); }
}

static void start(int rank, char** command) {
    const pid_t launcher = getpid();
    int ends[2];
    Child* c = &children[rank];
    c->out = -1;
    if (rank > 0 && pipe2(ends, O_CLOEXEC) != 0) { fail("pipe", strerror(errno)); }
    c->pid = fork();
    if (c->pid < 0) { fail("fork", strerror(errno)); }
    if (c->pid > 0) {
        if (rank > 0) {
            close(ends[1]);
            c->out = ends[0];
        }
        return;
    }
    setpgid(0, 0);  // Ctrl-C comes through us, once
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // if we are killed, the ranks save and end
    if (getppid() != launcher) { _exit(127); }  // it has died meanwhile
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    if (rank > 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        if (!freopen("/dev/null", "r", stdin)) { _exit(127); }
    }
    execvp(command[0], command);
    fprintf(stderr, "launch: %s: %s\n", command[0], strerror(errno));
    _exit(127);
}

static void show_line(int rank) {
    Child* c = &children[rank];
    char name[32];
    snprintf(name, sizeof name, "[rank %d]", rank);
    if (c->n == 0) { return; }
    if (!memmem(c->line, c->n, name, strlen(name))) { fprintf(stderr, "%s ", name); }  // else the trainer has said it
    fprintf(stderr, "%.*s%s", (int)c->n, c->line, c->line[c->n - 1] == '\n' ? "" : "\n");
    c->n = 0;
}

// whole lines of one rank, to stderr
static void read_lines(int rank) {
    Child* c = &children[rank];
    char buffer[LINE_BYTES];
    ssize_t n = read(c->out, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) { return; }
    for (ssize_t i = 0; i < n; i++) {
        c->line[c->n++] = buffer[i];
        if (buffer[i] == '\n' || c->n == LINE_BYTES) { show_line(rank); }
    }
    if (n <= 0) {
        show_line(rank);
        close(c->out);
        c->out = -1;
    }
}

// print for at most a tenth of a second
static void show_output(void) {
    struct pollfd ready[MAX_RANKS];
    int rank[MAX_RANKS], n = 0;
    for (int i = 0; i < n_ranks; i++) {
        if (children[i].out < 0) { continue; }
        ready[n].fd = children[i].out;
        ready[n].events = POLLIN;
        rank[n++] = i;
    }
    if (poll(ready, (nfds_t)n, 100) <= 0) { return; }
    for (int i = 0; i < n; i++) {
        if (ready[i].revents) { read_lines(rank[i]); }
    }
}

// Ranks that have ended; the status of the first bad one stays, but one that a signal of others killed is the cause of
// the rest.
static int collect(int* status, int killing) {
    int state, n_running = 0;
    for (pid_t pid; (pid = waitpid(-1, &state, WNOHANG)) > 0;) {
        int ended = WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
        for (int i = 0; i < n_ranks; i++) {
            if (children[i].pid != pid) { continue; }
            children[i].pid = 0;
            if (!WIFSIGNALED(state)) { continue; }
            fprintf(stderr, "launch: rank %d was killed by signal %d (%s)\n", i, WTERMSIG(state),
                    strsignal(WTERMSIG(state)));
        }
        if (*status == 0 || (!killing && *status < 128 && ended >= 128)) { *status = ended; }
    }
    for (int i = 0; i < n_ranks; i++) { n_running += children[i].pid > 0; }
    return n_running;
}

// what the ranks have left in the pipes; a program that one of them has started may keep a pipe open for ever
static void show_rest(void) {
    const double end = now() + GRACE_SECONDS;
    for (int n_open = 1; n_open > 0 && now() < end;) {
        n_open = 0;
        for (int i = 0; i < n_ranks; i++) { n_open += children[i].out >= 0; }
        if (n_open > 0) { show_output(); }
    }
}

int main(int argc, char** argv) {
    char* end = NULL;
    const int signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};
    int standard = open("/dev/null", O_RDWR);  // started without descriptors 0 to 2, we would give their numbers away
    while (standard >= 0 && standard < 3) { standard = open("/dev/null", O_RDWR); }
    if (standard > 2) { close(standard); }
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        printf("usage: launch -n RANKS PROGRAM [OPTION...]\nStarts 1..1024 ranks of a trainer on this machine, "
               "which train one model:\n    ./launch -n 4 ./train_gpt2 ...\n");
        return 0;
    }
    long n = argc >= 4 && strcmp(argv[1], "-n") == 0 ? strtol(argv[2], &end, 10) : 0;
    if (n < 1 || n > MAX_RANKS || *end) { fail("usage", "launch -n RANKS PROGRAM [OPTION...], 1..1024 ranks"); }
    n_ranks = (int)n;
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = forward;
        sigaction(signals[i], &action, NULL);
    }
    set_environment();
    for (int i = 0; i < n_ranks; i++) { start(i, argv + 3); }
    int status = 0, killing = 0;
    double first_failure = 0.0;
    while (collect(&status, killing) > 0) {
        show_output();
        if (status != 0 && first_failure == 0.0) { first_failure = now(); }
        if (status != 0 && now() > first_failure + GRACE_SECONDS) {
            killing = 1;
            forward(SIGKILL);
        }
    }
    show_rest();
    return status;
}
