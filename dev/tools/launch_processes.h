/*
The processes that launch has started: ranks of this machine, or an ssh to each host.
    set_environment, set_local_environment   what they are told
    start_rank, fork_child                   one more
    show_output                              lines of all of them, in turn
    wait_for_all                             until they have ended; what is left 5 s after a failure is killed
*/
#ifndef LAUNCH_PROCESSES_H
#define LAUNCH_PROCESSES_H
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 1024, LINE_BYTES = 4096, NAME_BYTES = 256, MAX_WORDS = 64 };
enum { GRACE_SECONDS = 5, FAREWELL_SECONDS = 3, READY_SECONDS = 30 };
#define READY_LINE "launch 3 ready "
#define USUAL_SSH "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"

typedef struct {
    char name[NAME_BYTES];
    char known[NAME_BYTES];    // its address, as this machine knows it; "-": not
    int most;                  // ranks that it takes
    int n_ranks;               // in this start
    char address[NAME_BYTES];  // what its agent has answered, "": nothing yet
    int port;
    char answer[LINE_BYTES];   // the line of that, while it comes
    size_t n_answer;
} Host;

typedef struct {  // a rank of this machine, or the ssh to a host
    pid_t pid;    // 0: has ended
    int in;       // a host: what it is told; -1: nothing any more
    int out;      // what it prints for people, -1: closed, or the terminal itself
    int answer;   // a host: that it is ready, then what rank 0 prints
    int status;   // of one that has ended, until it is counted
    char label[NAME_BYTES + 32];
    char line[LINE_BYTES];
    size_t n;     // bytes of the line that is not complete
} Child;

typedef enum { ON_THIS_MACHINE, ON_HOSTS, AS_AGENT } Role;

static struct {
    long n, restarts, min_ranks;  // n: on each host, -1: not given
    const char *hosts, *ssh;
    char** command;
    int n_command;
} options = {-1, 0, 0, NULL, USUAL_SSH, NULL, 0};

static Role role;
static Host hosts[MAX_RANKS];
static int n_hosts;
static Child children[MAX_RANKS];        // with --hosts one for each, in their order
static int n_children;
static int is_killing;                   // those that are left after a failure
static int n_killed;                     // of them in this start
static int kept_port = -1;               // a socket that keeps rank 0's port free
static int signals_from = -1;            // an agent: its stdin
static volatile sig_atomic_t signalled;  // somebody wants an end: the signal

// A line is written at once: rank 0 writes to the same terminal
static void say_line(const char* format, va_list args) {
    char text[2 * LINE_BYTES];
    vsnprintf(text, sizeof text, format, args);
    fprintf(stderr, "launch: %s\n", text);
}

__attribute__((format(printf, 1, 2)))
static void say(const char* format, ...) {
    va_list args;
    va_start(args, format);
    say_line(format, args);
    va_end(args);
}

// a mistake of the user
__attribute__((noreturn, format(printf, 1, 2)))
static void fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    say_line(format, args);
    va_end(args);
    exit(2);
}

// of a clock that nobody sets
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// "rank 3", "rank 3 @b"
static const char* name_of_child(const Child* c) {
    static char name[sizeof c->label];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(c->label + 1, "]"), c->label + 1);
    return name;
}

// ---- signals ----

// to every rank, or by the hosts to theirs; called by a handler, too
static void tell_all(int signal_number) {
    const unsigned char byte = (unsigned char)signal_number;
    for (int i = 0; i < n_children; i++) {
        const Child* c = &children[i];
        if (c->pid <= 0) { continue; }
        if (role != ON_HOSTS) { kill(c->pid, signal_number); }
        else if (c->in >= 0) {
            ssize_t n = write(c->in, &byte, 1);
            (void)n;  // it does not listen any more, so its ranks are ending
        }
    }
}

static void forward(int signal_number) {
    int error = errno;
    const int is_ending = role == AS_AGENT && signals_from < 0;  // a second signal would end a rank while it saves
    signalled = signal_number;
    if (!is_ending) { tell_all(signal_number); }
    errno = error;
}

static void catch_signals(void) {
    const int signals[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        struct sigaction action;
        memset(&action, 0, sizeof action);
        action.sa_handler = forward;
        sigaction(signals[i], &action, NULL);
    }
    // a host that is gone must not end us, nor us who reads what we print: an agent goes on until its ranks have ended
    if (role != ON_THIS_MACHINE) { signal(SIGPIPE, SIG_IGN); }
}

// ---- what the processes are told ----

static void set_number(const char* name, long number) {
    char text[32];
    snprintf(text, sizeof text, "%ld", number);
    setenv(name, text, 1);
}

// in the environment, which only this user can read, and not among the arguments, which everybody can
static void set_secret(void) {
    unsigned char bytes[32];
    char text[2 * sizeof bytes + 1];
    if (getentropy(bytes, sizeof bytes) != 0) { fail("random numbers for LLMC_SECRET: %s", strerror(errno)); }
    for (size_t i = 0; i < sizeof bytes; i++) { snprintf(text + 2 * i, 3, "%02x", bytes[i]); }
    setenv("LLMC_SECRET", text, 1);
}

// of this launch, and with its number of each start
static const char* own_id(void) {
    static char id[64];
    if (!*id) { snprintf(id, sizeof id, "launch-%ld-%ld-", (long)getpid(), (long)time(NULL)); }
    return id;
}

// what all ranks share
static void set_environment(const char* address, int port, int start) {
    const char* others[] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID",
                            "SLURM_STEP_ID"};
    char id[96];
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) { unsetenv(others[i]); }
    setenv("MASTER_ADDR", address, 1);
    set_number("MASTER_PORT", port);
    snprintf(id, sizeof id, "%s%d", own_id(), start);
    setenv("TORCHELASTIC_RUN_ID", id, 1);
    set_secret();
}

// what the ranks of one machine share; -n 4 on 8 cores makes 2 threads each
static void set_local_environment(int n_all, int n_here) {
    const long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    set_number("WORLD_SIZE", n_all);
    set_number("LOCAL_WORLD_SIZE", n_here);
    if (!getenv("OMP_NUM_THREADS")) { set_number("OMP_NUM_THREADS", n_cores > n_here ? n_cores / n_here : 1); }
}

// ---- processes ----

// a new child, which gets SIGTERM when we die: 1 in that process, 0 in this
static int fork_child(Child* c) {
    const pid_t launcher = getpid();
    c->in = c->out = c->answer = -1;
    c->n = 0;
    c->status = 0;
    c->pid = fork();
    if (c->pid < 0) { fail("fork: %s", strerror(errno)); }
    if (c->pid > 0) { return 0; }
    setpgid(0, 0);  // Ctrl-C comes through us, once
    signal(SIGPIPE, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);  // if we are killed, the ranks save and end
    if (getppid() != launcher) { _exit(127); }  // it has died meanwhile
    return 1;
}

static void open_pipe(int ends[2]) {
    if (pipe2(ends, O_CLOEXEC) != 0) { fail("pipe: %s", strerror(errno)); }
}

// the i-th rank of this machine; rank 0 keeps our output, and at home our input
static void start_rank(int i, int rank, const char* host) {
    Child* c = &children[i];
    int ends[2] = {-1, -1};
    if (rank > 0) { open_pipe(ends); }
    snprintf(c->label, sizeof c->label, *host ? "[rank %d @%s]" : "[rank %d]%s", rank, host);
    if (fork_child(c)) {
        set_number("RANK", rank);
        set_number("LOCAL_RANK", i);
        if (rank > 0) {
            dup2(ends[1], 1);
            dup2(ends[1], 2);
        }
        if ((rank > 0 || role == AS_AGENT) && !freopen("/dev/null", "r", stdin)) { _exit(127); }
        execvp(options.command[0], options.command);
        if (i == 0) { fprintf(stderr, "launch: %s: %s\n", options.command[0], strerror(errno)); }
        _exit(127);
    }
    if (rank > 0) { close(ends[1]); }
    c->out = ends[0];
}

static void show_line(Child* c) {
    if (c->n == 0) { return; }
    // a trainer has said who it is, but not where
    const int is_said = !strchr(c->label, '@') && memmem(c->line, c->n, c->label, strlen(c->label));
    const char *label = is_said ? "" : c->label, *end = c->line[c->n - 1] == '\n' ? "" : "\n";
    fprintf(stderr, "%s%s%.*s%s", label, *label ? " " : "", (int)c->n, c->line, end);
    c->n = 0;
}

static void close_end(int* fd) {
    if (*fd >= 0) { close(*fd); }
    *fd = -1;
}

// whole lines, to stderr
static void read_lines(Child* c) {
    char buffer[LINE_BYTES];
    ssize_t n = read(c->out, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) { return; }
    for (ssize_t i = 0; i < n; i++) {
        c->line[c->n++] = buffer[i];
        if (buffer[i] == '\n' || c->n == LINE_BYTES) { show_line(c); }
    }
    if (n <= 0) {
        show_line(c);
        close_end(&c->out);
    }
}

static void print_all(const char* text, size_t n) {
    while (n > 0) {
        const ssize_t written = write(1, text, n);
        if (written < 0 && errno == EINTR) { continue; }
        if (written < 0) {  // who read us has seen enough, as in `| head`: rank 0 would get this itself at home
            tell_all(SIGPIPE);
            return;
        }
        text += written;
        n -= (size_t)written;
    }
}

// What a host says until it is ready; its shell may print a greeting before that. Then it is what rank 0 prints
static void read_answer(int i) {
    Host* h = &hosts[i];
    char buffer[LINE_BYTES];
    const ssize_t n = read(children[i].answer, buffer, sizeof buffer);
    ssize_t used = 0;
    if (n < 0 && errno == EINTR) { return; }
    while (used < n && !*h->address) {
        h->answer[h->n_answer++] = buffer[used++];
        if (buffer[used - 1] != '\n' && h->n_answer < LINE_BYTES - 1) { continue; }
        h->answer[h->n_answer] = '\0';
        h->n_answer = 0;
        if (sscanf(h->answer, READY_LINE "%255s %d", h->address, &h->port) == 2) { break; }
        *h->address = '\0';
        fprintf(stderr, "[%s] %s", h->name, h->answer);
    }
    if (n <= 0) { close_end(&children[i].answer); }
    else { print_all(buffer + used, (size_t)(n - used)); }
}

// An agent: signals for its ranks. The end of them is the end of the connection, or of launch; sshd may have told us so
// by a signal before, and just once: none comes between
static void read_signals(void) {
    unsigned char byte;
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    const ssize_t n = read(signals_from, &byte, 1);  // poll has said that it is ready
    if (n <= 0) { signals_from = -1; }
    is_killing |= n > 0 && byte == SIGKILL;
    if (n > 0 || !signalled) { tell_all(n > 0 ? byte : SIGTERM); }
    sigprocmask(SIG_SETMASK, &before, NULL);
}

// print for at most a tenth of a second
static void show_output(void) {
    static struct pollfd ready[2 * MAX_RANKS + 1];
    static int child[2 * MAX_RANKS];
    int n = 0;
    for (int i = 0; i < 2 * n_children; i++) {
        const int fd = i % 2 == 0 ? children[i / 2].out : children[i / 2].answer;
        if (fd < 0) { continue; }
        ready[n].fd = fd;
        ready[n].events = POLLIN;
        child[n++] = i;
    }
    ready[n].fd = signals_from;
    ready[n].events = POLLIN;
    ready[n].revents = 0;
    if (poll(ready, (nfds_t)n + 1, 100) <= 0) { return; }
    for (int i = 0; i < n; i++) {
        if (!ready[i].revents) { continue; }
        if (child[i] % 2 == 0) { read_lines(&children[child[i] / 2]); }
        else { read_answer(child[i] / 2); }
    }
    if (ready[n].revents) { read_signals(); }
}

// what the processes have left in the pipes; a program that one of them has started may keep a pipe open for ever
static void show_rest(void) {
    const double end = now() + GRACE_SECONDS;
    for (int n_open = 1; n_open > 0 && now() < end;) {
        n_open = 0;
        for (int i = 0; i < n_children; i++) { n_open += children[i].out >= 0 || children[i].answer >= 0; }
        if (n_open > 0) { show_output(); }
    }
    for (int i = 0; i < n_children; i++) {
        close_end(&children[i].out);
        close_end(&children[i].answer);
    }
}

// a host whose ssh has ended: with the status of its ranks, or because the connection is gone
static int status_of_host(int i, int state) {
    if (WIFEXITED(state) && WEXITSTATUS(state) != 255) { return WEXITSTATUS(state); }
    if (hosts[i].n_ranks == 0) { return 255; }  // it did not even begin
    if (WIFEXITED(state)) { say("host %s is lost: the connection of ssh has ended", hosts[i].name); }
    else { n_killed++, say("host %s does not answer: its ranks end when they notice", hosts[i].name); }
    return 1;
}

// notes the children that have ended
static int count_running(void) {
    int state, n_running = 0;
    for (pid_t pid; (pid = waitpid(-1, &state, WNOHANG)) > 0;) {
        for (int i = 0; i < n_children; i++) {
            Child* c = &children[i];
            if (c->pid != pid) { continue; }
            c->pid = 0;
            close_end(&c->in);
            c->status = role == ON_HOSTS  ? status_of_host(i, state)
                        : WIFEXITED(state) ? WEXITSTATUS(state)
                                           : 128 + WTERMSIG(state);
            if (role == ON_HOSTS || !WIFSIGNALED(state)) { continue; }
            const int by = WTERMSIG(state);
            if (is_killing) { n_killed++, say("%s had not ended, and was killed", name_of_child(c)); }
            else { say("%s was killed by signal %d (%s)", name_of_child(c), by, strsignal(by)); }
        }
    }
    for (int i = 0; i < n_children; i++) { n_running += children[i].pid > 0; }
    return n_running;
}

// The status of the first bad one stays, but one that a signal of others killed is the cause of the rest. What has been
// counted is forgotten
static int first_bad_status(int status) {
    for (int i = 0; i < n_children; i++) {
        Child* c = &children[i];
        if (c->pid > 0) { continue; }
        if (status == 0 || (!is_killing && status < 128 && c->status >= 128)) { status = c->status; }
        c->status = 0;
    }
    return status;
}

// Until all have ended; returns the status of the start. A mistake (2) ends all ranks: where one stood still, rank 0
// has waited for it in vain, and the start has failed (1)
static int wait_for_all(void) {
    const double grace = role == ON_HOSTS ? GRACE_SECONDS + 2 : GRACE_SECONDS;  // a host gives its own ranks 5 s
    int status = 0;
    double first_failure = 0.0;
    is_killing = n_killed = 0;
    if (signalled) { tell_all(signalled); }  // it came while the processes were started
    for (;;) {
        const int n_running = count_running();
        status = first_bad_status(status);
        if (n_running == 0) { break; }
        show_output();
        if (status == 0) { continue; }
        if (first_failure == 0.0) { first_failure = now(); }
        if (now() > first_failure + grace) {
            is_killing = 1;
            tell_all(SIGKILL);
        }
        if (role != ON_HOSTS || now() < first_failure + grace + FAREWELL_SECONDS) { continue; }
        for (int i = 0; i < n_children; i++) {
            if (children[i].pid > 0) { kill(children[i].pid, SIGKILL); }
        }
    }
    show_rest();
    return status == 2 && n_killed > 0 ? 1 : status;
}
#endif  // LAUNCH_PROCESSES_H
