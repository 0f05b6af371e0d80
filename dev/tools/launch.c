/*
Starts P ranks of a trainer, on this machine or on several, and behaves like one program.
    make launch && ./launch -n 4 ./train_gpt2 --train book.txt --model tiny
    ./launch --hosts a,b -n 4 --restarts 3 ./train_gpt2 --train book.txt --model tiny --run runs/book
Each process gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), a run
id and LLMC_SECRET, which is drawn anew in each start and which ranks prove to know when they meet; variables of other
launchers are taken away. Rank 0 keeps the terminal; lines of the others say "[rank 2]", or "[rank 2 @b]".
SIGINT, SIGTERM, SIGUSR1 and SIGHUP go on to all ranks. When one fails, the others have 5 s to say so and are then
killed. When launch itself is killed they get SIGTERM.
Status: 0 when all ranks end with 0, else that of the first that failed (128 + the signal for one that was killed).

--hosts: on each, ssh starts this program once more, by the path it has here, as `launch --agent`. They talk like this:
    agent, stdout    "launch 3 ready ADDRESS PORT": where rank 0 would listen, a port that is kept free for it
    launch           8 digits, the number of bytes that follow, and these: texts, each with a zero behind it:
                     folder, first rank, ranks here, ranks in all, number of variables, the variables, the command
    launch           a byte for each signal, its number; the end: SIGTERM to the ranks
    agent, stdout    what rank 0 prints there; the lines of all others are on stderr
So the secret is in no list of arguments, and ranks end where the connection does. An agent ends with the status of its
ranks, ssh with 255 when it is the connection that failed.

--restarts: a run that ended otherwise than by status 0, a mistake (2, 126, 127) or a signal to launch begins again with
--continue: from its newest checkpoint, or anew. Hosts that do not answer then are left out.
Explained in doc/ranks.md
*/
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

enum { MAX_RANKS = 1024, LINE_BYTES = 4096, NAME_BYTES = 256, MAX_WORDS = 16 };
enum { GRACE_SECONDS = 5, FAREWELL_SECONDS = 3, READY_SECONDS = 30 };
#define READY_LINE "launch 3 ready "
#define USUAL_SSH "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"

typedef struct {
    char name[NAME_BYTES];
    int most;                   // ranks that it takes
    int n_ranks;                // in this start
    char address[NAME_BYTES];   // what its agent has answered, "": nothing yet
    int port;
    char answer[LINE_BYTES];    // the line of that, while it comes
    size_t n_answer;
} Host;

typedef struct {        // a rank of this machine, or the ssh to a host
    pid_t pid;          // 0: has ended
    int in;             // a host: what it is told; -1: nothing any more
    int out;            // what it prints for people, -1: closed, or the terminal itself
    int answer;         // a host: that it is ready, then what rank 0 prints
    int status;         // when it has ended
    char label[NAME_BYTES + 32];
    char line[LINE_BYTES];
    size_t n;           // bytes of the line that is not complete
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
static int kept_port = -1;               // a socket that keeps rank 0's port free
static int signals_from = -1;            // an agent: its stdin
static volatile sig_atomic_t signalled;  // somebody wants an end: the signal

__attribute__((noreturn, format(printf, 1, 2)))
static void fail(const char* format, ...) {
    va_list args;
    fprintf(stderr, "launch: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(2);
}

__attribute__((format(printf, 1, 2)))
static void say(const char* format, ...) {
    va_list args;
    fprintf(stderr, "launch: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
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

// ---- addresses ----

// in numbers; 0: no address of this name is known here
static int find_address(char text[NAME_BYTES], const char* host) {
    struct addrinfo hints, *found = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    int good = getaddrinfo(host, NULL, &hints, &found) == 0;
    good = good && getnameinfo(found->ai_addr, found->ai_addrlen, text, NAME_BYTES, NULL, 0, NI_NUMERICHOST) == 0;
    if (found) { freeaddrinfo(found); }
    return good;
}

static int is_loopback(const char* address) { return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0; }

// A port for rank 0 at this address, which is given in numbers; 0: that is no address of this machine. We stay bound to
// it, without listening, so that the system gives it to nobody else; rank 0 may listen there all the same, for both say
// SO_REUSEADDR.
static int free_port(const char* address) {
    struct sockaddr_storage bound;
    struct addrinfo hints, *found = NULL;
    socklen_t n_bytes = sizeof bound;
    int on = 1;
    memset(&hints, 0, sizeof hints);
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(address, "0", &hints, &found) != 0) { return 0; }
    if (kept_port >= 0) { close(kept_port); }
    kept_port = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int good = kept_port >= 0 && setsockopt(kept_port, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                     bind(kept_port, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(kept_port, (struct sockaddr*)&bound, &n_bytes) == 0;
    freeaddrinfo(found);
    if (!good) { return 0; }
    return ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6*)&bound)->sin6_port
                                             : ((struct sockaddr_in*)&bound)->sin_port);
}

// the address of this machine in the network in which that one is; 0: there is none. Nothing is sent
static int find_address_towards(char text[NAME_BYTES], const char* other) {
    struct sockaddr_storage own;
    struct addrinfo hints, *found = NULL;
    socklen_t n_bytes = sizeof own;
    memset(&hints, 0, sizeof hints);
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_DGRAM;
    if (getaddrinfo(other, "9", &hints, &found) != 0) { return 0; }
    const int fd = socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const int good = fd >= 0 && connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                     getsockname(fd, (struct sockaddr*)&own, &n_bytes) == 0 &&
                     getnameinfo((struct sockaddr*)&own, n_bytes, text, NAME_BYTES, NULL, 0, NI_NUMERICHOST) == 0;
    freeaddrinfo(found);
    if (fd >= 0) { close(fd); }
    return good;
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
        fprintf(stderr, "launch: %s: %s\n", options.command[0], strerror(errno));
        _exit(127);
    }
    if (rank > 0) { close(ends[1]); }
    c->out = ends[0];
}

static void show_line(Child* c) {
    const char* at = strchr(c->label, '@');
    if (c->n == 0) { return; }
    // a trainer has said who it is, but not where
    if (*c->label && (at || !memmem(c->line, c->n, c->label, strlen(c->label)))) { fprintf(stderr, "%s ", c->label); }
    fprintf(stderr, "%.*s%s", (int)c->n, c->line, c->line[c->n - 1] == '\n' ? "" : "\n");
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
// by a signal before
static void read_signals(void) {
    unsigned char byte;
    const ssize_t n = read(signals_from, &byte, 1);
    if (n < 0 && errno == EINTR) { return; }
    if (n <= 0) { signals_from = -1; }
    is_killing |= n > 0 && byte == SIGKILL;
    if (n > 0 || !signalled) { tell_all(n > 0 ? byte : SIGTERM); }
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
    else { say("host %s does not answer: its ranks end when they notice", hosts[i].name); }
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
            if (is_killing) { say("%s had not ended, and was killed", name_of_child(c)); }
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

// until all have ended; returns the status of the start
static int wait_for_all(void) {
    const double grace = role == ON_HOSTS ? GRACE_SECONDS + 2 : GRACE_SECONDS;  // a host gives its own ranks 5 s
    int status = 0;
    double first_failure = 0.0;
    is_killing = 0;
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
    return status;
}

// ---- this machine ----

static void start_here(int start) {
    const int port = free_port("127.0.0.1");
    if (port == 0) { fail("no free port: %s", strerror(errno)); }
    n_children = (int)options.n;
    set_environment("127.0.0.1", port, start);
    set_local_environment(n_children, n_children);
    for (int i = 0; i < n_children; i++) { start_rank(i, i, ""); }
}

// ---- an agent: the ranks of a host ----

static void read_exactly(char* bytes, size_t n) {
    for (ssize_t got; n > 0; bytes += got, n -= (size_t)got) {
        got = read(0, bytes, n);
        if (got == 0 || (got < 0 && errno != EINTR)) { exit(0); }  // launch needs no ranks here, or is gone
        got = got < 0 ? 0 : got;
    }
}

// the next of the texts that launch has sent, a number, and one that must be there
static char* next_text(char** at, const char* end) {
    char* text = *at;
    if (text >= end) { fail("--agent is for launch itself: expected more texts"); }
    *at += strlen(text) + 1;
    return text;
}

static int next_number(char** at, const char* end) { return (int)strtol(next_text(at, end), NULL, 10); }

// Where rank 0 of a run would listen here: at the address by which launch knows this host, else in the network of
// another host, else where ssh has come in
static int find_own_address(char address[NAME_BYTES], const char* known, const char* other) {
    const char* connection = getenv("SSH_CONNECTION");
    int port = 0;
    snprintf(address, NAME_BYTES, "%s", known);
    if ((port = free_port(address)) > 0) { return port; }
    if (find_address_towards(address, other) && !is_loopback(address)) { port = free_port(address); }
    if (port > 0) { return port; }
    if (connection && sscanf(connection, "%*s %*s %255s", address) == 1 && !is_loopback(address)) {
        port = free_port(address);
    }
    if (port == 0) { snprintf(address, NAME_BYTES, "-"); }
    return port;
}

// is this process a rank of an earlier start of the same launch? id: "launch-PID-TIME-START", of this start
static int is_earlier(const char* process, const char* id) {
    char path[64], text[65536], variable[NAME_BYTES];
    const int n_id = (int)(strrchr(id, '-') + 1 - id);
    snprintf(variable, sizeof variable, "TORCHELASTIC_RUN_ID=%.*s", n_id, id);
    snprintf(path, sizeof path, "/proc/%.20s/environ", process);
    FILE* file = fopen(path, "r");  // only ours can be read
    if (!file) { return 0; }
    const size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = '\0';
    const char* found = memmem(text, n, variable, strlen(variable));
    return found && strtol(found + strlen(variable), NULL, 10) < strtol(id + n_id, NULL, 10);
}

// Ranks of an earlier start whose connection has ended, and not they: rank 0 would keep the run to itself. They have
// been told to end, and have a while to save
static void end_earlier_ranks(const char* name, const char* id) {
    const double end = now() + READY_SECONDS;
    for (int n_left = 1, is_told = 0; n_left > 0; is_told = 1) {
        const int is_late = now() > end;
        DIR* processes = opendir("/proc");
        n_left = 0;
        for (struct dirent* e; processes && (e = readdir(processes));) {
            if (!isdigit((unsigned char)e->d_name[0]) || !is_earlier(e->d_name, id)) { continue; }
            n_left++;
            if (is_late) { kill((pid_t)strtol(e->d_name, NULL, 10), SIGKILL); }
        }
        if (processes) { closedir(processes); }
        if (n_left > 0 && !is_told) { say("host %s: ranks of the start before are there yet: waiting for them", name); }
        if (n_left > 0) { nanosleep(&(struct timespec){0, 100000000}, NULL); }
    }
}

static int run_agent(const char* name, const char* known, const char* other) {
    char address[NAME_BYTES], digits[9] = "";
    const int port = find_own_address(address, known, other);
    printf(READY_LINE "%s %d\n", address, port);
    fflush(stdout);
    read_exactly(digits, 8);
    const size_t n_bytes = strtoul(digits, NULL, 10);
    char* texts = malloc(n_bytes + 1);
    if (!texts) { fail("%s: no memory for a command of %zu bytes", name, n_bytes); }
    read_exactly(texts, n_bytes);
    texts[n_bytes] = '\0';
    char *at = texts, *end = texts + n_bytes;
    const char* folder = next_text(&at, end);
    const int first = next_number(&at, end), n_here = next_number(&at, end), n_all = next_number(&at, end);
    for (int i = next_number(&at, end); i > 0; i--) { putenv(next_text(&at, end)); }
    options.command = calloc(n_bytes + 1, sizeof(char*));
    if (!options.command || n_here < 1 || n_here > MAX_RANKS) { fail("--agent is for launch itself"); }
    while (at < end) { options.command[options.n_command++] = next_text(&at, end); }
    if (chdir(folder) != 0) {
        fail("host %s: %s: %s: expected the same folder on each host", name, folder, strerror(errno));
    }
    set_local_environment(n_all, n_here);
    const char* id = getenv("TORCHELASTIC_RUN_ID");
    if (id && strchr(id, '-')) { end_earlier_ranks(name, id); }
    n_children = n_here;
    catch_signals();
    for (int i = 0; i < n_here; i++) { start_rank(i, first + i, name); }
    signals_from = 0;
    return wait_for_all();
}

// ---- hosts ----

// where: the line of a file, or "--hosts"
static void add_host(const char* where, const char* name, long most) {
    const size_t n = strlen(name);
    int good = n > 0 && n < NAME_BYTES && isalnum((unsigned char)name[0]);
    for (size_t i = 0; i < n; i++) { good = good && (isalnum((unsigned char)name[i]) || strchr("._-@:%", name[i])); }
    if (!good) { fail("%s: expected hosts such as node1 or ann@10.0.0.1, found \"%.60s\"", where, name); }
    for (int i = 0; i < n_hosts; i++) {
        if (strcmp(hosts[i].name, name) != 0) { continue; }
        fail("%s: expected each host once, found %s again: more ranks on it are -n, or a number behind its name in a "
             "file of hosts", where, name);
    }
    if (n_hosts == MAX_RANKS) { fail("%s: expected at most %d hosts", where, MAX_RANKS); }
    snprintf(hosts[n_hosts].name, NAME_BYTES, "%s", name);
    hosts[n_hosts++].most = (int)most;
}

static long read_number(const char* where, const char* text, long least, long most) {
    char* end;
    const long x = strtol(text, &end, 10);
    if (end == text || *end || x < least || x > most) {
        fail("%s: expected a number %ld..%ld, found \"%.60s\"", where, least, most, text);
    }
    return x;
}

// a host [ranks] on each line, # begins a comment
static void read_hosts_file(const char* path, long usual) {
    char text[1024], where[NAME_BYTES + 32], rest[2];
    FILE* file = fopen(path, "r");
    if (!file) { fail("--hosts: %s: %s", path, strerror(errno)); }
    for (int line = 1; fgets(text, sizeof text, file); line++) {
        char name[sizeof text], number[sizeof text];
        snprintf(where, sizeof where, "%.200s: line %d", path, line);
        text[strcspn(text, "#\n")] = '\0';
        const int n = sscanf(text, "%s %s %1s", name, number, rest);
        if (n > 2) { fail("%s: expected a host and its number of ranks, found \"%.60s\"", where, text); }
        if (n > 0) { add_host(where, name, n == 2 ? read_number(where, number, 1, MAX_RANKS) : usual); }
    }
    fclose(file);
    if (n_hosts == 0) { fail("--hosts: %s: expected a line for each host, found none", path); }
}

// a,b,c or a file
static void read_hosts(const char* text, long usual) {
    struct stat status;
    if (!strchr(text, ',') && (strchr(text, '/') || (stat(text, &status) == 0 && !S_ISDIR(status.st_mode)))) {
        read_hosts_file(text, usual);
        return;
    }
    char* names = strdup(text);
    if (!names) { fail("no memory"); }
    for (char *name = names, *next; name; name = next) {
        next = strchr(name, ',');
        if (next) { *next++ = '\0'; }
        add_host("--hosts", name, usual);
    }
    free(names);
}

// an address of this host as this machine knows it, "-": none
static void find_host(char address[NAME_BYTES], const Host* h) {
    const char* at = strrchr(h->name, '@');
    if (!find_address(address, at ? at + 1 : h->name)) { snprintf(address, NAME_BYTES, "-"); }
}

// What the agent of host i is told of addresses: its own, and one of another. A loopback address means this machine,
// which is no answer when there are others, too
static void find_addresses(int i, char own[NAME_BYTES], char other[NAME_BYTES]) {
    char address[NAME_BYTES];
    int n_others = 0;  // machines that are not this one
    find_host(own, &hosts[i]);
    snprintf(other, NAME_BYTES, "-");
    for (int k = 0; k < n_hosts; k++) {
        find_host(address, &hosts[k]);
        n_others += !is_loopback(address);
        if (k != i && !is_loopback(address) && *other == '-') { snprintf(other, NAME_BYTES, "%s", address); }
    }
    if (is_loopback(own) && n_others > 0) { snprintf(own, NAME_BYTES, "-"); }
}

// for the shell of a host: '/home/ann/llmc/launch'
static void quote(char* out, size_t n_out, const char* text) {
    size_t n = 0;
    out[n++] = '\'';
    for (; *text && n + 6 < n_out; text++) {
        if (*text == '\'') { n += (size_t)snprintf(out + n, n_out - n, "'\\''"); }
        else { out[n++] = *text; }
    }
    snprintf(out + n, n_out - n, "'");
}

// this program, which stands at the same place on all hosts
static const char* own_path(void) {
    static char path[LINE_BYTES];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n < 0) { fail("/proc/self/exe: %s", strerror(errno)); }
    path[n] = '\0';
    return path;
}

// ssh to host i, with a pipe for each of its three ends
static void start_host(int i) {
    char program[2 * LINE_BYTES], command[3 * LINE_BYTES], own[NAME_BYTES], other[NAME_BYTES], words[LINE_BYTES];
    char* arguments[MAX_WORDS + 3];
    int to[2], answers[2], lines[2], n = 0;
    Child* c = &children[i];
    Host* h = &hosts[i];
    find_addresses(i, own, other);
    quote(program, sizeof program, own_path());
    snprintf(command, sizeof command, "exec %s --agent %s %s %s", program, h->name, own, other);
    snprintf(words, sizeof words, "%s", options.ssh);
    for (char* word = strtok(words, " "); word && n < MAX_WORDS; word = strtok(NULL, " ")) { arguments[n++] = word; }
    arguments[n++] = h->name;
    arguments[n++] = command;
    arguments[n] = NULL;
    *h->address = '\0';
    h->n_answer = 0;
    h->n_ranks = 0;
    *c->label = '\0';  // its agent says who speaks
    open_pipe(to);
    open_pipe(answers);
    open_pipe(lines);
    if (fork_child(c)) {
        unsetenv("LLMC_SECRET");  // of the start before this one
        unsetenv("TORCHELASTIC_RUN_ID");
        if (dup2(to[0], 0) < 0 || dup2(answers[1], 1) < 0 || dup2(lines[1], 2) < 0) { _exit(127); }
        execvp(arguments[0], arguments);
        fprintf(stderr, "launch: %s: %s\n", arguments[0], strerror(errno));
        _exit(255);
    }
    close(to[0]);
    close(answers[1]);
    close(lines[1]);
    fcntl(to[1], F_SETFL, O_NONBLOCK);  // a handler of signals writes there
    c->in = to[1];
    c->answer = answers[0];
    c->out = lines[0];
}

// Connects to all hosts at once, until each has answered or it is clear that it will not
static void reach_hosts(void) {
    const double end = now() + READY_SECONDS;
    n_children = n_hosts;
    for (int i = 0; i < n_hosts; i++) { start_host(i); }
    for (int n_left = 1; n_left > 0 && now() < end && !signalled;) {
        n_left = 0;
        count_running();
        show_output();
        for (int i = 0; i < n_hosts; i++) { n_left += !*hosts[i].address && children[i].pid > 0; }
    }
}

// leaves a host alone: it gets no ranks in this start
static void leave_host(int i) {
    Child* c = &children[i];
    const int is_ready = *hosts[i].address != '\0';
    close_end(&c->in);
    for (const double end = now() + 2.0; is_ready && c->pid > 0 && now() < end; count_running()) { show_output(); }
    if (c->pid > 0) {
        kill(c->pid, SIGKILL);
        waitpid(c->pid, NULL, 0);
    }
    c->pid = 0;
    c->status = 0;
    for (const double end = now() + 0.5; c->out >= 0 && now() < end;) { show_output(); }  // why not, in ssh's words
    close_end(&c->out);
    close_end(&c->answer);
}

// the variables that go along: those of the meeting, and what a user sets for threads, GPUs and checks
static int goes_along(const char* variable) {
    const char* begins[] = {"LLMC_SECRET=", "MASTER_ADDR=", "MASTER_PORT=", "TORCHELASTIC_RUN_ID=", "COMM_CHECK=",
                            "LD_LIBRARY_PATH=", "OMP_", "GOMP_", "KMP_", "NCCL_", "CUDA_", "MALLOC_"};
    int found = 0;
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++) {
        found = found || strncmp(variable, begins[i], strlen(begins[i])) == 0;
    }
    return found;
}

static void add_text(FILE* to, const char* text) { fwrite(text, 1, strlen(text) + 1, to); }

static void add_number(FILE* to, long number) { fprintf(to, "%ld%c", number, 0); }

// what host i has to do; 0: it does not take it
static int send_task(int i, int first, int n_all) {
    char here[LINE_BYTES], *task = NULL;
    size_t n_task = 0;
    int n_variables = 0;
    FILE* to = open_memstream(&task, &n_task);
    if (!to || !getcwd(here, sizeof here)) { fail("the folder in which launch was started: %s", strerror(errno)); }
    fprintf(to, "%08d", 0);
    add_text(to, here);
    add_number(to, first);
    add_number(to, hosts[i].n_ranks);
    add_number(to, n_all);
    for (char** v = environ; *v; v++) { n_variables += goes_along(*v); }
    add_number(to, n_variables);
    for (char** v = environ; *v; v++) {
        if (goes_along(*v)) { add_text(to, *v); }
    }
    for (int k = 0; k < options.n_command; k++) { add_text(to, options.command[k]); }
    if (fclose(to) != 0 || n_task > 99999999) { fail("a command of %zu bytes: no memory, or too long", n_task); }
    char digits[9];
    snprintf(digits, sizeof digits, "%08zu", n_task - 8);
    memcpy(task, digits, 8);
    size_t sent = 0;
    for (const double end = now() + READY_SECONDS; sent < n_task && now() < end;) {
        const ssize_t n = write(children[i].in, task + sent, n_task - sent);
        if (n < 0 && errno != EAGAIN && errno != EINTR) { break; }
        sent += n > 0 ? (size_t)n : 0;
        if (n <= 0) { show_output(); }
    }
    explicit_bzero(task, n_task);
    free(task);
    return sent == n_task;
}

// ---- how many ranks ----

// the value of an option of the trainer, typed as --tp 2 or --tp=2; the last counts. NULL: it was not typed
static const char* typed(const char* name) {
    const char* value = NULL;
    const size_t n = strlen(name);
    for (int i = 1; i < options.n_command; i++) {
        const char* word = options.command[i];
        if (strncmp(word, name, n) != 0) { continue; }
        if (word[n] == '=') { value = word + n + 1; }
        if (word[n] == '\0') { value = i + 1 < options.n_command ? options.command[i + 1] : ""; }
    }
    return value;
}

static int typed_number(const char* name) {
    const char* text = typed(name);
    const int x = text ? (int)strtol(text, NULL, 10) : 1;
    return x > 0 ? x : 1;
}

// How many of n ranks can train when `before` of them have begun: a multiple of what shares matrices, layers and
// experts. With --ep an update has a multiple of as many micro-batches, so it is a divisor of what it was.
static int fitting_ranks(int n, int before) {
    const int unit = typed_number("--tp") * typed_number("--pp") * typed_number("--ep");
    n -= n % unit;
    while (n > 0 && typed_number("--ep") > 1 && before % n != 0) { n -= unit; }
    return n;
}

// "--tp 2 --pp 2", of those that were typed
static const char* grid(void) {
    static char text[128];
    const char* names[] = {"--tp", "--pp", "--ep"};
    size_t n = 0;
    *text = '\0';
    for (int i = 0; i < 3; i++) {
        const int size = typed_number(names[i]);
        if (size > 1) { n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %d", n > 0 ? " " : "", names[i], size); }
    }
    return text;
}

// the first start: every host answers, or the user has something to mend
static void need_host(int i, int status) {
    const char* name = hosts[i].name;
    if (*hosts[i].address) { return; }
    for (int k = 0; k < n_hosts; k++) { leave_host(k); }
    if (status == 126 || status == 127) {
        fail("--hosts: %s: expected this program there, too, at %s: none that runs was found", name, own_path());
    }
    if (status < 0) { fail("--hosts: %s: expected an answer within %d s, found none", name, READY_SECONDS); }
    fail("--hosts: %s cannot be reached: expected \"%s %s true\" to work, found status %d", name, options.ssh, name,
         status);
}

// Deals out the ranks, host by host; returns their number, 0: too few. before: of the first start, 0 in that
static int deal_ranks(int before) {
    int most = 0;
    for (int i = 0; i < n_hosts; i++) { most += *hosts[i].address ? hosts[i].most : 0; }
    const int n = before > 0 ? fitting_ranks(most, before) : most;
    for (int i = 0, left = n; i < n_hosts; i++) {
        const int here = !*hosts[i].address ? 0 : left < hosts[i].most ? left : hosts[i].most;
        hosts[i].n_ranks = here;
        left -= here;
    }
    if (n != most) { say("%d ranks can run, of which %d fit %s", most, n, grid()); }
    if (n == 0) { say("too few ranks are left: giving up"); }
    else if (n < options.min_ranks) {
        say("%d ranks can run, fewer than --min-ranks %ld: giving up", n, options.min_ranks);
    }
    return n >= options.min_ranks ? n : 0;
}

// Begins on the hosts that answer; returns the number of ranks, 0 when there are too few
static int start_on_hosts(int start, int before) {
    int first = 0, master = -1;
    is_killing = 0;
    reach_hosts();
    if (signalled) { return 0; }
    for (int i = 0; i < n_hosts; i++) {
        if (before == 0) { need_host(i, children[i].pid > 0 ? -1 : children[i].status); }
        else if (!*hosts[i].address) { say("host %s cannot be reached: it is left out", hosts[i].name); }
    }
    const int n = deal_ranks(before);
    for (int i = 0; i < n_hosts; i++) {
        if (n == 0 || hosts[i].n_ranks == 0) { leave_host(i); }
        else if (master < 0) { master = i; }
    }
    if (n == 0) { return 0; }
    if (hosts[master].port == 0) {
        fail("--hosts: %s: expected a name of an address of that machine, at which the others reach it, found none: "
             "give the number", hosts[master].name);
    }
    set_environment(hosts[master].address, hosts[master].port, start);
    for (int i = 0; i < n_hosts; i++) {
        if (hosts[i].n_ranks == 0) { continue; }
        if (!send_task(i, first, n)) { close_end(&children[i].in); }  // it has left meanwhile
        first += hosts[i].n_ranks;
    }
    return n;
}

// ---- the command line ----

static const char help[] =
    "usage: launch -n RANKS [OPTION...] PROGRAM [OPTION OF THE PROGRAM...]\n"
    "Starts ranks of a trainer, which train one model:\n"
    "    ./launch -n 4 ./train_gpt2 ...                    4 ranks on this machine\n"
    "    ./launch --hosts a,b -n 4 ./train_gpt2 ...        8 ranks on two, over ssh\n"
    "    ./launch -n 4 --restarts 3 ./train_gpt2 --run runs/book ...\n"
    "\n"
    "  -n RANKS           1..1024; with --hosts on each of them, by default 1\n"
    "  --hosts A,B,C      the machines; rank 0 is on the first and listens at its address alone. Each has the same\n"
    "                     folder, program and launch, under the same paths, and takes ssh without a password\n"
    "  --hosts FILE       a line for each: its name and, if it is not -n, its number of ranks; # begins a comment\n"
    "  --ssh COMMAND      instead of \"" USUAL_SSH "\": a host and\n"
    "                     a command for its shell follow\n"
    "  --restarts N       when a rank dies or hangs: up to N times again, from the newest checkpoint of the --run, to\n"
    "                     the same bits. Hosts that do not answer any more are left out\n"
    "  --min-ranks M      ... but not with fewer ranks than M\n"
    "doc/ranks.md has more.\n";

// the value of an option of ours; the program comes later
static const char* option_value(int argc, char** argv, int i) {
    if (i + 1 >= argc) { fail("%s: expected a value, found nothing", argv[i]); }
    return argv[i + 1];
}

static void check_options(void) {
    const int n = (int)(options.n < 0 ? 1 : options.n);
    long n_ranks = 0;
    if (options.hosts) { read_hosts(options.hosts, n); }
    for (int i = 0; i < n_hosts; i++) { n_ranks += hosts[i].most; }
    if (n_ranks > MAX_RANKS) { fail("--hosts: expected at most %d ranks, found %ld", MAX_RANKS, n_ranks); }
    if (!options.hosts && options.min_ranks > 0) { fail("--min-ranks: is for --hosts, of which some may be left out"); }
    if (options.hosts && options.min_ranks > n_ranks) {
        fail("--min-ranks: expected at most the %ld ranks of --hosts, found %ld", n_ranks, options.min_ranks);
    }
    if (options.min_ranks > 0 && options.restarts == 0) { fail("--min-ranks: is for --restarts N"); }
    if (strspn(options.ssh, " ") == strlen(options.ssh)) { fail("--ssh: expected a command, found nothing"); }
    const int has_run = typed("--run") || typed("-o") || typed("--out-dir") || typed("--output-dir") || typed("--args");
    if (options.restarts > 0 && !has_run) {
        fail("--restarts: expected --run DIR behind %s, to go on from its newest checkpoint, found none",
             options.command[0]);
    }
}

static void read_options(int argc, char** argv) {
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i += 2) {
        const char* name = argv[i];
        if (strcmp(name, "-n") == 0) { options.n = read_number(name, option_value(argc, argv, i), 1, MAX_RANKS); }
        else if (strcmp(name, "--hosts") == 0) { options.hosts = option_value(argc, argv, i); }
        else if (strcmp(name, "--ssh") == 0) { options.ssh = option_value(argc, argv, i); }
        else if (strcmp(name, "--restarts") == 0) {
            options.restarts = read_number(name, option_value(argc, argv, i), 0, 1000000);
        } else if (strcmp(name, "--min-ranks") == 0) {
            options.min_ranks = read_number(name, option_value(argc, argv, i), 1, MAX_RANKS);
        } else { fail("%.60s: unknown option: launch --help", name); }
    }
    if (i >= argc || (options.n < 0 && !options.hosts)) {
        fail("usage: launch -n RANKS PROGRAM [OPTION...], 1..%d ranks", MAX_RANKS);
    }
    options.command = argv + i;
    options.n_command = argc - i;
    check_options();
}

// from now on the command goes on where there is a checkpoint, and begins anew where there is none
static void add_continue(void) {
    if (typed("--continue") || typed("--resume") || typed("-y")) { return; }
    char** longer = calloc((size_t)options.n_command + 2, sizeof(char*));
    if (!longer) { fail("no memory"); }
    memcpy(longer, options.command, sizeof(char*) * (size_t)options.n_command);
    longer[options.n_command++] = (char*)"--continue";
    options.command = longer;
}

// start after start; returns the status of the last
static int run_all(void) {
    int status = 0, n = 0;
    for (int start = 0;; start++) {
        if (role == ON_THIS_MACHINE) {
            start_here(start);
            n = (int)options.n;
        } else {
            const int n_now = start_on_hosts(start, n);
            if (n_now == 0) { return status > 0 ? status : 1; }
            if (start > 0) { say("%d ranks go on", n_now); }
            n = start == 0 ? n_now : n;
        }
        status = wait_for_all();
        if (status == 0 || status == 2 || status == 126 || status == 127 || signalled) { return status; }
        if (start == options.restarts) {
            if (start > 0) { say("status %d after %d restarts: giving up", status, start); }
            return status;
        }
        add_continue();
        say("the run ended with status %d: restart %d of %ld, from its newest checkpoint if it has one", status,
            start + 1, options.restarts);
    }
}

int main(int argc, char** argv) {
    int standard = open("/dev/null", O_RDWR);  // started without descriptors 0 to 2, we would give their numbers away
    while (standard >= 0 && standard < 3) { standard = open("/dev/null", O_RDWR); }
    if (standard > 2) { close(standard); }
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(help, stdout);
        return 0;
    }
    if (argc == 5 && strcmp(argv[1], "--agent") == 0) {
        role = AS_AGENT;
        return run_agent(argv[2], argv[3], argv[4]);
    }
    read_options(argc, argv);
    role = options.hosts ? ON_HOSTS : ON_THIS_MACHINE;
    catch_signals();
    return run_all();
}
