/*
Ranks over plain TCP: how P processes find each other, and bytes between any two of them.
Meeting: rank 0 listens where HOST:PORT says, or at any free port and says where in a file that all machines see. Every
other rank listens on a port of its own, connects to rank 0 (again and again until it is there) and says hello. When all
have come, rank 0 sends everyone the list of addresses, and each rank connects to all lower ones. A rank that comes
twice, believes in another number of ranks or belongs to another run is told so by rank 0, and its name stands in the
message; after the time limit the names of the missing ranks do.
    offset  size  meaning of a hello, native byte order (all machines of a run are of one kind)
    0       4     magic 0x4c4d4331
    4       4     protocol version 1
    8       8     hash of the run id; with a file the random number in it
    16      4     number of ranks
    20      4     rank
    24      4     port where this rank listens
    28      4     channel: 0 meeting, 1 data, 2 control
A file that an earlier run has left names a port where nobody listens, or whose owner knows nothing of this run. Ranks
then go on looking until rank 0 has put its own there. It removes the file when all have met.
Afterwards two ranks share two connections: data, on which comm.h says what each piece belongs to, and control, on which nothing is sent
until something goes wrong. A process that dies closes both, so its peers know at once; one that stops by itself leaves
a TcpNote on control, so that the others name the culprit and not merely the next to leave.
Errors: fail_input for what a user gave, fail_run when the time is up.
Source: spec/parallel.md 10.2
*/
#ifndef LLMC_COMM_TCP_H
#define LLMC_COMM_TCP_H
#include "comm_launch.h"  // RankPlace, outfile.h
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { TCP_MAGIC = 0x4c4d4331, TCP_VERSION = 1, TCP_MEETING = 0, TCP_DATA = 1, TCP_CONTROL = 2, TCP_OTHER_RUN = 2 };

typedef struct {
    uint32_t magic, version;
    uint64_t run;
    int32_t size, rank;
    uint32_t port, channel;
} TcpHello;

typedef struct {
    struct sockaddr_storage address;
    socklen_t n_bytes;
} TcpAddress;

typedef struct {  // rank 0's answer; the list of addresses follows when nothing is refused
    uint32_t magic;
    int32_t refused;  // TCP_OTHER_RUN, or 1 for another reason, which rank 0 then says
    char text[504];
} TcpAnswer;

typedef struct {  // the last words of a rank
    int32_t rank, status;  // who is to blame; what to exit with
    uint64_t said;         // hash of the line that this rank has for the user, 0: none
    char text[240];        // what happened to it: "was killed"
} TcpNote;

typedef struct {
    int rank, size;
    uint64_t run;
    int *data, *control;  // a socket for each rank, -1 for our own
} TcpMesh;

// ---- sockets with a time limit; a deadline is a time of the monotonic clock in seconds ----

static inline double tcp_now_(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// in so many seconds, but not after the deadline
static inline double tcp_soon_(double seconds, double deadline) {
    double soon = tcp_now_() + seconds;
    return soon < deadline ? soon : deadline;
}

// 1 when the socket is ready, 0 when the time is up
static inline int tcp_ready_(int fd, int events, double deadline) {
    for (;;) {
        struct pollfd p = {fd, (short)events, 0};
        double left = deadline - tcp_now_();
        int n = poll(&p, 1, left > 0.0 ? (int)(1000.0 * (left < 1e6 ? left : 1e6)) + 1 : 0);
        if (n > 0) { return 1; }
        if (tcp_now_() >= deadline) { return 0; }
    }
}

// all n bytes, or 0: closed, broken, or too late
static inline int tcp_read_(int fd, void* data, size_t n_bytes, double deadline) {
    char* p = (char*)data;
    while (n_bytes > 0) {
        if (!tcp_ready_(fd, POLLIN, deadline)) { return 0; }
        ssize_t n = recv(fd, p, n_bytes, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) { return 0; }
        p += n > 0 ? n : 0;
        n_bytes -= n > 0 ? (size_t)n : 0;
    }
    return 1;
}

static inline int tcp_write_(int fd, const void* data, size_t n_bytes, double deadline) {
    const char* p = (const char*)data;
    while (n_bytes > 0) {
        if (!tcp_ready_(fd, POLLOUT, deadline)) { return 0; }
        ssize_t n = send(fd, p, n_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) { return 0; }
        p += n > 0 ? n : 0;
        n_bytes -= n > 0 ? (size_t)n : 0;
    }
    return 1;
}

static inline struct addrinfo* tcp_resolve_(const char* host, int port, int flags) {
    struct addrinfo hints, *found = NULL;
    char service[16];
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    snprintf(service, sizeof service, "%d", port);
    int status = getaddrinfo(host, service, &hints, &found);
    if (status != 0) { fail_input("MASTER_ADDR: no address of \"%s\": %s", host ? host : "any", gai_strerror(status)); }
    return found;
}

// a socket that listens, or -1 with errno. Named by a loopback address it is open to this machine alone.
static inline int tcp_listen_at_(const struct sockaddr* address, socklen_t n_bytes, int backlog) {
    int on = 1, off = 0, fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) { return -1; }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    // IPv4 as well
    if (address->sa_family == AF_INET6) { setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off); }
    if (bind(fd, address, n_bytes) == 0 && listen(fd, backlog) == 0) { return fd; }
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

// where rank 0 listens: at HOST itself when that is this machine's loopback, else on all its addresses
static inline int tcp_listen_master_(const RankPlace* place) {
    int local = strncmp(place->host, "127.", 4) == 0 || strcmp(place->host, "localhost") == 0 ||
                strcmp(place->host, "::1") == 0;
    struct addrinfo* list = tcp_resolve_(local ? place->host : NULL, place->port, AI_PASSIVE);
    int fd = -1;
    for (int family = AF_INET6; fd < 0; family = AF_INET) {  // an IPv6 socket on all addresses takes IPv4 too
        for (struct addrinfo* a = list; a && fd < 0; a = a->ai_next) {
            if (a->ai_family == family || local) {
                fd = tcp_listen_at_(a->ai_addr, a->ai_addrlen, 2 * place->size + 16);
            }
        }
        if (family == AF_INET) { break; }
    }
    if (fd < 0) {
        fail_input("MASTER_ADDR=%s, MASTER_PORT=%d: rank 0 cannot listen there: %s%s", place->host, place->port,
                   strerror(errno), errno == EADDRINUSE ? " (another run? choose another port)" : "");
    }
    freeaddrinfo(list);
    return fd;
}

static inline int tcp_port_(int fd) {
    TcpAddress a;
    a.n_bytes = sizeof a.address;
    if (getsockname(fd, (struct sockaddr*)&a.address, &a.n_bytes) != 0) {
        fail_run("a socket's own address: %s", strerror(errno));
    }
    return ntohs(a.address.ss_family == AF_INET6 ? ((struct sockaddr_in6*)&a.address)->sin6_port
                                                 : ((struct sockaddr_in*)&a.address)->sin_port);
}

static inline void tcp_set_port_(TcpAddress* a, uint32_t port) {
    if (a->address.ss_family == AF_INET6) { ((struct sockaddr_in6*)&a->address)->sin6_port = htons((uint16_t)port); }
    else { ((struct sockaddr_in*)&a->address)->sin_port = htons((uint16_t)port); }
}

// a connection to this address, or -1: nobody listens there (yet)
static inline int tcp_connect_(const TcpAddress* to, double deadline) {
    int on = 1, error = 0, fd = socket(to->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t n_error = sizeof error;
    if (fd < 0) { return -1; }
    int status = connect(fd, (const struct sockaddr*)&to->address, to->n_bytes);
    if (status != 0 && errno == EINPROGRESS && tcp_ready_(fd, POLLOUT, deadline)) {
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n_error);
        status = error == 0 ? 0 : -1;
    }
    if (status != 0) {
        close(fd);
        return -1;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

// who has connected, or -1
static inline int tcp_accept_(int listener) {
    int on = 1, fd = accept(listener, NULL, NULL);
    if (fd < 0) { return -1; }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

// ---- a file by which ranks meet ----

// What the file says; 0: it is not there yet, or empty, and nothing is changed. Rank 0 replaces the file, so another
// than such a one is an error.
static inline int tcp_read_file_(RankPlace* at, uint64_t* run, const char* path) {
    char text[200], host[64];
    struct stat status;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), is_open = fd >= 0 && fstat(fd, &status) == 0;
    const int is_file = is_open && S_ISREG(status.st_mode);
    const ssize_t n = !is_open ? -1 : is_file ? read(fd, text, sizeof text - 1) : 0;
    const int error = errno;
    if (fd >= 0) { close(fd); }
    // ESTALE: just replaced, on NFS
    if ((n < 0 && (error == ENOENT || error == ESTALE)) || (n == 0 && is_file)) { return 0; }
    if (n < 0) { fail_input("%s, by which ranks meet: %s", path, strerror(error)); }
    text[n] = '\0';
    int port;
    uint64_t key;
    if (sscanf(text, "ranks meet at %63s port %d run %" SCNx64, host, &port, &key) != 3 || port < 1 || port > 65535) {
        fail_input("%s: expected a file by which ranks meet, or none, found something else: choose another name", path);
    }
    snprintf(at->host, sizeof at->host, "%s", host);
    at->port = port;
    *run = key;
    return 1;
}

// 1 when other machines may reach this address, which `text` then is in numbers: not a loopback, not a link-local one
static inline int tcp_is_public_(char text[64], const struct sockaddr* a) {
    const char* own[] = {"127.", "169.254.", "fe80:", "::1"};
    if (!a || (a->sa_family != AF_INET && a->sa_family != AF_INET6)) { return 0; }
    socklen_t n_bytes = a->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    int found = getnameinfo(a, n_bytes, text, 64, NULL, 0, NI_NUMERICHOST) == 0;
    for (int i = 0; i < 4; i++) { found = found && strncmp(text, own[i], strlen(own[i])) != 0; }
    return found;
}

// Where others reach this machine: the address of its name, else of its first network interface (/etc/hosts often gives
// the name a loopback address), else loopback. In numbers, for the name may mean nothing, or something else, to another
// machine.
static inline void tcp_own_address_(char text[64]) {
    char name[256] = "";
    struct addrinfo hints, *list = NULL;
    struct ifaddrs* interfaces = NULL;
    int found = 0;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    if (gethostname(name, sizeof name - 1) == 0 && getaddrinfo(name, NULL, &hints, &list) == 0) {
        for (struct addrinfo* a = list; a && !found; a = a->ai_next) { found = tcp_is_public_(text, a->ai_addr); }
        freeaddrinfo(list);
    }
    if (!found && getifaddrs(&interfaces) == 0) {
        for (struct ifaddrs* i = interfaces; i && !found; i = i->ifa_next) {
            found = (i->ifa_flags & IFF_RUNNING) && tcp_is_public_(text, i->ifa_addr);
        }
        freeifaddrs(interfaces);
    }
    if (!found) { snprintf(text, 64, "127.0.0.1"); }
}

// rank 0 says where it listens, and draws the number by which its run is known
static inline void tcp_announce_(TcpMesh* m, const char* path, int port) {
    RankPlace earlier;
    OutFile f;
    char temporary[PATH_BYTES], host[64], text[200];
    tcp_read_file_(&earlier, &m->run, path);
    if (getentropy(&m->run, sizeof m->run) != 0) { fail_run("random number for a run: %s", strerror(errno)); }
    tcp_own_address_(host);
    int n = snprintf(text, sizeof text, "ranks meet at %s port %d run %016" PRIx64 "\n", host, port, m->run);
    outfile_open(&f, temporary_path(temporary, path));
    outfile_write(&f, text, (size_t)n);
    outfile_close(&f);
    file_publish(temporary, path);
}

// ... and removes that, unless another run has put its own there
static inline void tcp_withdraw_(const TcpMesh* m, const char* path) {
    RankPlace at;
    uint64_t run;
    if (tcp_read_file_(&at, &run, path) && run == m->run) { unlink(path); }
}

// Waits for the answer of rank 0, which comes when all ranks have met; 0: it does not, or the file (NULL: without one)
// has been replaced meanwhile, and who listens here was not our rank 0
static inline int tcp_await_(const TcpMesh* m, int fd, const char* file, double deadline) {
    RankPlace at;
    uint64_t run;
    while (tcp_now_() < deadline) {
        if (tcp_ready_(fd, POLLIN, file ? tcp_soon_(1.0, deadline) : deadline)) { return 1; }
        if (file && tcp_read_file_(&at, &run, file) && run != m->run) { return 0; }
    }
    return 0;
}

// ---- the meeting ----

static inline uint64_t tcp_hash_(const char* text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text; text++) { hash = (hash ^ (unsigned char)*text) * 0x100000001b3u; }
    return hash;
}

static inline TcpHello tcp_hello_(const TcpMesh* m, int port, int channel) {
    TcpHello hello = {TCP_MAGIC, TCP_VERSION, m->run, m->size, m->rank, (uint32_t)port, (uint32_t)channel};
    return hello;
}

// "2, 3 and 5" of those without a connection
static inline void tcp_missing_(char* text, size_t n_text, const int* fd, int n) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = 1; i < n && used + 16 < n_text; i++) {
        if (fd[i] < 0) { used += (size_t)snprintf(text + used, n_text - used, "%s%d", used ? ", " : "", i); }
    }
}

// tells those who are here why nothing comes of it, and stops
__attribute__((noreturn))
static inline void tcp_refuse_all_(const int* fd, int n, const char* text) {
    TcpAnswer answer;
    memset(&answer, 0, sizeof answer);
    answer.magic = TCP_MAGIC;
    answer.refused = 1;
    snprintf(answer.text, sizeof answer.text, "%s", text);
    for (int i = 1; i < n; i++) {
        if (fd[i] >= 0) { tcp_write_(fd[i], &answer, sizeof answer, tcp_now_() + 1.0); }
    }
    fail_input("%s", text);
}

static inline int tcp_is_closed_(int fd) {
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

// rank 0: one newcomer. Strangers are sent away; a contradiction ends the start on all ranks.
static inline void tcp_admit_(const TcpMesh* m, int fd, int* meeting, TcpAddress* list) {
    TcpHello h;
    char text[400];
    if (!tcp_read_(fd, &h, sizeof h, tcp_now_() + 2.0) || h.magic != TCP_MAGIC || h.channel != TCP_MEETING) {
        close(fd);
        return;
    }
    TcpAnswer refusal = {TCP_MAGIC, TCP_OTHER_RUN,
                         "another run's rank 0 listens at this MASTER_ADDR and MASTER_PORT: choose another port"};
    if (h.version != TCP_VERSION || h.run != m->run) {
        tcp_write_(fd, &refusal, sizeof refusal, tcp_now_() + 1.0);
        close(fd);
        return;
    }
    refusal.refused = 1;
    int known = h.rank > 0 && h.rank < m->size,
        taken = known && meeting[h.rank] >= 0 && !tcp_is_closed_(meeting[h.rank]);
    if (h.size != m->size || !known || taken) {
        if (h.size != m->size) {
            snprintf(text, sizeof text, "rank 0 was started for %d ranks, rank %d for %d", m->size, h.rank, h.size);
        } else {
            snprintf(text, sizeof text, "two processes say that they are rank %d of %d", h.rank, m->size);
        }
        snprintf(refusal.text, sizeof refusal.text, "%s", text);
        tcp_write_(fd, &refusal, sizeof refusal, tcp_now_() + 1.0);
        tcp_refuse_all_(meeting, m->size, text);
    }
    if (meeting[h.rank] >= 0) { close(meeting[h.rank]); }
    meeting[h.rank] = fd;
    TcpAddress* a = &list[h.rank];
    a->n_bytes = sizeof a->address;
    if (getpeername(fd, (struct sockaddr*)&a->address, &a->n_bytes) != 0) {
        fail_run("address of rank %d: %s", h.rank, strerror(errno));
    }
    tcp_set_port_(a, h.port);
}

// rank 0 waits for all, then everyone gets the list
static inline void tcp_gather_(const TcpMesh* m, int listener, TcpAddress* list, double timeout) {
    int* meeting = (int*)malloc_check(sizeof(int) * (size_t)m->size, "connections");
    double deadline = tcp_now_() + timeout;
    char missing[200], text[400];
    memset(meeting, 0xff, sizeof(int) * (size_t)m->size);
    for (tcp_missing_(missing, sizeof missing, meeting, m->size); *missing;
         tcp_missing_(missing, sizeof missing, meeting, m->size)) {
        if (!tcp_ready_(listener, POLLIN, deadline)) {
            snprintf(text, sizeof text, "after %.0f s these of %d ranks have not come: %s", timeout, m->size, missing);
            tcp_refuse_all_(meeting, m->size, text);
        }
        int fd = tcp_accept_(listener);
        if (fd >= 0) { tcp_admit_(m, fd, meeting, list); }
    }
    TcpAnswer welcome = {TCP_MAGIC, 0, ""};
    for (int i = 1; i < m->size; i++) {
        int good = tcp_write_(meeting[i], &welcome, sizeof welcome, deadline) &&
                   tcp_write_(meeting[i], list, sizeof(TcpAddress) * (size_t)m->size, deadline);
        if (!good) { fail_run("rank %d left before all ranks had met", i); }
        close(meeting[i]);
    }
    free(meeting);
}

// One attempt of another rank: 1 when the list has come. With a file it may be in vain: who listens there is not our
// rank 0, or a machine that is gone keeps silent.
static inline int tcp_join_once_(const TcpMesh* m, const RankPlace* place, const char* file, int* listener,
                                 TcpAddress* list, double deadline) {
    struct addrinfo* found = tcp_resolve_(place->host, place->port, 0);
    int fd = -1, good = 0;
    for (struct addrinfo* a = found; a && fd < 0; a = a->ai_next) {
        memset(&list[0], 0, sizeof list[0]);
        memcpy(&list[0].address, a->ai_addr, a->ai_addrlen);
        list[0].n_bytes = a->ai_addrlen;
        fd = tcp_connect_(&list[0], file ? tcp_soon_(3.0, deadline) : deadline);
    }
    freeaddrinfo(found);
    if (fd < 0) { return 0; }
    TcpAddress master = list[0], own;
    own.n_bytes = sizeof own.address;
    if (getsockname(fd, (struct sockaddr*)&own.address, &own.n_bytes) != 0) {
        fail_run("own address: %s", strerror(errno));
    }
    tcp_set_port_(&own, 0);
    if (*listener < 0) { *listener = tcp_listen_at_((struct sockaddr*)&own.address, own.n_bytes, 2 * m->size + 16); }
    if (*listener < 0) { fail_run("rank %d cannot listen: %s", m->rank, strerror(errno)); }
    TcpHello hello = tcp_hello_(m, tcp_port_(*listener), TCP_MEETING);
    TcpAnswer answer;
    int answered = tcp_write_(fd, &hello, sizeof hello, deadline) && tcp_await_(m, fd, file, deadline + 5.0) &&
                   tcp_read_(fd, &answer, sizeof answer, tcp_now_() + 5.0);
    if (answered && !(file && (answer.magic != TCP_MAGIC || answer.refused == TCP_OTHER_RUN))) {
        answer.text[sizeof answer.text - 1] = '\0';
        if (answer.magic != TCP_MAGIC) { fail_input("%s:%d: this is not rank 0 of a run", place->host, place->port); }
        if (answer.refused == TCP_OTHER_RUN) { fail_input("%s", answer.text); }
        if (answer.refused) { exit(2); }  // rank 0 of our run says it
        good = tcp_read_(fd, list, sizeof(TcpAddress) * (size_t)m->size, deadline + 5.0);
        list[0] = master;
    }
    close(fd);
    return good;
}

static inline int tcp_join_(TcpMesh* m, const RankPlace* place, TcpAddress* list, double timeout) {
    const char* file = place_has_file(place) ? place->host : NULL;
    double deadline = tcp_now_() + timeout;
    int listener = -1;
    struct timespec pause = {0, 20000000};
    RankPlace at = *place;  // with a file: what it says
    while (!((!file || tcp_read_file_(&at, &m->run, file)) &&
             tcp_join_once_(m, &at, file, &listener, list, deadline))) {
        if (tcp_now_() > deadline && file && at.port == 0) {
            fail_run("%s: rank 0 has not written this file within %.0f s: was it started, and do both machines see the "
                     "folder?", file, timeout);
        }
        if (tcp_now_() > deadline) {
            fail_run("rank 0 did not answer at %s:%d%s%s within %.0f s: was it started, and can this machine reach it?",
                     at.host, at.port, file ? ", as says " : "", file ? file : "", timeout);
        }
        // it takes one address, and the next attempt may leave by another interface
        if (listener >= 0) { close(listener); }
        listener = -1;
        nanosleep(&pause, NULL);
        pause.tv_nsec = pause.tv_nsec < 500000000 ? 2 * pause.tv_nsec : pause.tv_nsec;
    }
    return listener;
}

// data and control to every rank below, then from every rank above
static inline void tcp_connect_all_(TcpMesh* m, int listener, const TcpAddress* list, double timeout) {
    double deadline = tcp_now_() + timeout;
    for (int i = 0; i < 2 * m->rank; i++) {
        int channel = i % 2 ? TCP_CONTROL : TCP_DATA, fd = tcp_connect_(&list[i / 2], deadline);
        TcpHello hello = tcp_hello_(m, 0, channel);
        if (fd < 0 || !tcp_write_(fd, &hello, sizeof hello, deadline)) {
            fail_run("rank %d cannot reach rank %d", m->rank, i / 2);
        }
        (channel == TCP_DATA ? m->data : m->control)[i / 2] = fd;
    }
    for (int n_missing = 2 * (m->size - 1 - m->rank); n_missing > 0;) {
        TcpHello h;
        int fd = tcp_ready_(listener, POLLIN, deadline) ? tcp_accept_(listener) : -1;
        if (fd < 0 && tcp_now_() > deadline) {
            fail_run("rank %d: %d connections from higher ranks are missing", m->rank, n_missing);
        }
        if (fd < 0) { continue; }
        int good = tcp_read_(fd, &h, sizeof h, tcp_now_() + 2.0) && h.magic == TCP_MAGIC && h.run == m->run &&
                   h.rank > m->rank && h.rank < m->size && (h.channel == TCP_DATA || h.channel == TCP_CONTROL);
        int* slot = !good ? NULL : h.channel == TCP_DATA ? &m->data[h.rank] : &m->control[h.rank];
        if (!slot || *slot >= 0) {
            close(fd);
            continue;
        }
        *slot = fd;
        n_missing--;
    }
}

static inline void tcp_open(TcpMesh* m, const RankPlace* place, double timeout) {
    size_t n = (size_t)place->size;
    memset(m, 0, sizeof *m);
    m->rank = place->rank;
    m->size = place->size;
    m->run = tcp_hash_(place->run_id);
    m->data = (int*)malloc_check(2 * n * sizeof(int), "connections");
    m->control = m->data + n;
    memset(m->data, 0xff, 2 * n * sizeof(int));
    TcpAddress* list = (TcpAddress*)calloc(n, sizeof(TcpAddress));
    if (!list) { fail_run("no memory for %zu addresses", n); }
    const char* file = place_has_file(place) ? place->host : NULL;
    char parent[PATH_BYTES];
    int listener;
    if (file && access(path_parent(parent, file), m->rank == 0 ? W_OK : F_OK) != 0) {
        fail_input("%s: ranks cannot meet by this file: %s: %s", file, parent, strerror(errno));
    }
    if (m->rank == 0) {
        listener = tcp_listen_master_(place);
        if (file) { tcp_announce_(m, file, tcp_port_(listener)); }
        tcp_gather_(m, listener, list, timeout);
        if (file) { tcp_withdraw_(m, file); }
    } else {
        listener = tcp_join_(m, place, list, timeout);
    }
    tcp_connect_all_(m, listener, list, timeout);
    close(listener);
    free(list);
}

static inline void tcp_close(TcpMesh* m) {
    for (int i = 0; i < 2 * m->size; i++) {
        if (m->data[i] >= 0) { close(m->data[i]); }
    }
    free(m->data);
    memset(m, 0, sizeof *m);
}

// ---- bytes and last words ----

// bytes of `head` and then of `data` taken now: 0 when the connection is full (or empty, for tcp_recv); -1: the other
// side is gone
static inline ssize_t tcp_send(const TcpMesh* m, int peer, const void* head, size_t n_head, const void* data, size_t n) {
    struct iovec parts[2] = {{(void*)head, n_head}, {(void*)data, n}};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    ssize_t sent = sendmsg(m->data[peer], &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent >= 0 ? sent : errno == EAGAIN || errno == EINTR ? 0 : -1;
}

static inline ssize_t tcp_recv(const TcpMesh* m, int peer, void* head, size_t n_head, void* data, size_t n) {
    struct iovec parts[2] = {{head, n_head}, {data, n}};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    ssize_t come = recvmsg(m->data[peer], &message, MSG_DONTWAIT);
    return come > 0 ? come : come < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

static inline void tcp_leave_note(const TcpMesh* m, const TcpNote* note) {
    for (int i = 0; i < m->size; i++) {
        if (m->control[i] >= 0) {
            ssize_t n = send(m->control[i], note, sizeof *note, MSG_DONTWAIT | MSG_NOSIGNAL);
            (void)n;  // who is gone needs no note
        }
    }
}

// the end of our stream to every rank; what was sent before it arrives. Who waits for more notices that we are leaving
static inline void tcp_hang_up(const TcpMesh* m) {
    for (int i = 0; i < m->size; i++) {
        if (m->data[i] >= 0) { shutdown(m->data[i], SHUT_WR); }
    }
}

// 1: a note from this peer; -1: it is gone without one; 0: neither, within `seconds`
static inline int tcp_read_note(const TcpMesh* m, int peer, TcpNote* note, double seconds) {
    double deadline = tcp_now_() + seconds;
    if (!tcp_ready_(m->control[peer], POLLIN, deadline)) { return 0; }
    if (!tcp_read_(m->control[peer], note, sizeof *note, deadline + 1.0)) { return -1; }
    if (note->rank < 0 || note->rank >= m->size || note->status < 1 || note->status > 255) { return -1; }
    note->text[sizeof note->text - 1] = '\0';
    return 1;
}
#endif  // LLMC_COMM_TCP_H
