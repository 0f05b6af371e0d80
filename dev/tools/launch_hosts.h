/*
Ranks on other machines: launch, there, as an agent. launch.c has what the two say to each other.
    free_port                                   for rank 0, of this machine
    run_agent                                   there: the ranks of a host
    read_hosts, find_hosts                      --hosts
    reach_hosts, leave_host, send_task          here: connections, and what they are told to do
*/
#ifndef LAUNCH_HOSTS_H
#define LAUNCH_HOSTS_H
#include "launch_processes.h"

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

// ---- an agent: the ranks of a host ----

static void read_exactly(char* bytes, size_t n) {
    for (ssize_t got; n > 0; bytes += got, n -= (size_t)got) {
        got = read(0, bytes, n);
        if (got == 0 || (got < 0 && errno != EINTR)) { exit(0); }  // launch needs no ranks here, or is gone
        got = got < 0 ? 0 : got;
    }
}

// the next of the texts that launch has sent
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
    signals_from = 0;
    catch_signals();
    for (int i = 0; i < n_here; i++) { start_rank(i, first + i, name); }
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
    struct stat status;
    if (stat(path, &status) == 0 && !S_ISREG(status.st_mode)) {
        fail("--hosts: %s: expected a file with a line for each host, found something that is no regular file", path);
    }
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

// asks for the addresses of all hosts, once
static void find_hosts(void) {
    for (int i = 0; i < n_hosts; i++) {
        const char* at = strrchr(hosts[i].name, '@');
        if (!find_address(hosts[i].known, at ? at + 1 : hosts[i].name)) { snprintf(hosts[i].known, NAME_BYTES, "-"); }
    }
}

// What the agent of host i is told of addresses: its own, and one of another host. A loopback address means this
// machine, which is no answer when there are others, too
static void choose_addresses(int i, const char** own, const char** other) {
    int n_others = 0;  // hosts that are not this machine
    *own = hosts[i].known;
    *other = "-";
    for (int k = 0; k < n_hosts; k++) {
        if (is_loopback(hosts[k].known)) { continue; }
        n_others++;
        if (k != i && strcmp(*other, "-") == 0) { *other = hosts[k].known; }
    }
    if (is_loopback(*own) && n_others > 0) { *own = "-"; }
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
    char program[2 * LINE_BYTES], command[3 * LINE_BYTES], words[LINE_BYTES];
    const char *own, *other;
    char* arguments[MAX_WORDS + 3];
    int to[2], answers[2], lines[2], n = 0;
    Child* c = &children[i];
    Host* h = &hosts[i];
    choose_addresses(i, &own, &other);
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
    const char* begins[] = {"LLMC_SECRET=", "MASTER_ADDR=", "MASTER_PORT=", "TORCHELASTIC_RUN_ID=", "LLMC_JOB=",
                            "COMM_CHECK=", "LD_LIBRARY_PATH=", "OMP_", "GOMP_", "KMP_", "NCCL_", "CUDA_", "MALLOC_"};
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
#endif  // LAUNCH_HOSTS_H
