/*
Ranks over plain TCP: how P processes find each other, and bytes between any two of them.
Meeting: rank 0 listens where HOST:PORT says, or at any free port and says where in a file that all machines see. Every
other rank listens on a port of its own, connects to rank 0 (again and again until it is there) and says hello. When all
have come, rank 0 sends everyone the list of addresses, and each rank connects to all lower ones. A rank that comes
twice, believes in another number of ranks or belongs to another run is told so by rank 0, and its name stands in the
message; after the time limit the names of the missing ranks do.
Every connection begins with a proof that both sides know the secret of the run, which itself is never sent:
    who listens      magic, version, 16 random bytes                                            TcpBanner
    who connects     magic, channel, run, size, rank, port, to, 16 random bytes, proof          TcpHello
    who listens      magic, code, proof; to the meeting when all have come, with the list       TcpAnswer
A proof is the HMAC-SHA256 of all that was said before it on this connection, so none can be used twice, or for
another purpose. Native byte order: all machines of a run are of one kind. Where there is no secret the proofs are sums
that find noise, and anybody who reaches the port can make them.
Strangers: who listens asks all that have connected at once, takes a rank as soon as its proof is there, and gives
nobody more than 5 s or more than one of TCP_GUESTS places (the oldest makes room). So who says nothing, noise, or a
byte a second delays nobody and takes no rank's place, and no time limit is longer for it.
A file that an earlier run has left names a port where nobody listens, or whose owner knows nothing of this run. Ranks
then go on looking until rank 0 has put its own there. It holds a lock on it meanwhile, by which another run that wants
the same file is told apart from what an earlier one has left, and removes it when all have met.
Afterwards two ranks share two connections: data, on which comm.h says what each piece belongs to, and control, on which
nothing is sent until something goes wrong. A process that dies closes both, so its peers know at once; one that stops
by itself leaves a TcpNote on control, so that the others name the culprit and not merely the next to leave.
What is sent on them is neither encrypted nor signed: a network on which others can read or change it must be trusted.
Errors: fail_input for what a user gave, fail_run when the time is up.
Source: doc/ranks.md; Bellare, Canetti, Krawczyk 1996, Keying Hash Functions for Message Authentication
*/
#ifndef LLMC_COMM_TCP_H
#define LLMC_COMM_TCP_H
#include "../core/print.h"  // seconds_now
#include "comm_launch.h"    // RankPlace, outfile.h
#include "hmac.h"           // hmac_begin, hmac_is_equal
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { TCP_MAGIC = 0x4c4d4332, TCP_VERSION = 2 };
typedef enum { TCP_MEETING, TCP_DATA, TCP_CONTROL } TcpChannel;
typedef enum { TCP_WELCOME, TCP_STOPS, TCP_OTHER_RUN, TCP_OTHER_SECRET } TcpCode;  // the first two are proven

typedef struct {
    uint32_t magic, version;
    uint8_t random[16];
} TcpBanner;

typedef struct {
    uint32_t magic, channel;
    uint64_t run;       // hash of the run id; with a file the random number in it
    int32_t size, rank;
    uint32_t port;      // where this rank listens
    int32_t to;         // the rank that it wants to speak to
    uint8_t random[16], proof[SHA256_BYTES];
} TcpHello;

typedef struct {
    uint32_t magic, code;
    uint8_t proof[SHA256_BYTES];
} TcpAnswer;

typedef struct {
    struct sockaddr_storage address;
    socklen_t n_bytes;
} TcpAddress;

typedef struct {  // the last words of a rank
    int32_t rank, status;  // who is to blame; what to exit with
    uint64_t said;         // hash of the line that this rank has for the user, 0: none
    char text[240];        // what happened to it: "was killed"
} TcpNote;

typedef struct {
    int rank, size;
    uint64_t run;
    char secret[SECRET_BYTES];  // while ranks meet; "": none
    int *data, *control;        // a socket for each rank, -1 for our own
} TcpMesh;

typedef struct {  // a connection, and what was said on it so far
    int fd;
    double until;   // the time it has to say all
    size_t n_read;  // of hello
    TcpBanner banner;
    TcpHello hello;
} TcpGuest;

// TCP_WAITING: connections that the system takes before we do (net.core.somaxconn may make it fewer). Ranks do not look
// at theirs before all have met, and who finds no place tries again after a second
enum { TCP_GUESTS = 64, TCP_WAITING = 4096 };

typedef struct {
    const TcpMesh* m;
    int listener, n_guests, n_refused, error;  // error: of the last accept that failed
    double shut_until;                         // accept has failed: not to be tried again before
    TcpGuest guest[TCP_GUESTS];                // the oldest first
    struct pollfd* polled;
} TcpDoor;

// ---- sockets with a time limit; a deadline is a time of the monotonic clock in seconds ----

static inline double tcp_now_(void) { return seconds_now(CLOCK_MONOTONIC); }

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
    int on = 1, off = 0, fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
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

static inline int tcp_is_loopback_(const struct sockaddr* a) {
    const uint32_t v4 = a->sa_family == AF_INET ? ntohl(((const struct sockaddr_in*)a)->sin_addr.s_addr) : 0;
    const struct in6_addr* v6 = &((const struct sockaddr_in6*)a)->sin6_addr;
    return a->sa_family == AF_INET ? v4 >> 24 == 127
                                   : a->sa_family == AF_INET6 && memcmp(v6, &in6addr_loopback, sizeof *v6) == 0;
}

// On all addresses of this machine, or -1 with errno. An IPv6 socket takes IPv4 too, where there is IPv6
static inline int tcp_listen_everywhere_(int port, int backlog) {
    struct addrinfo* list = tcp_resolve_(NULL, port, AI_PASSIVE);
    int fd = -1;
    for (int i = 0; i < 2; i++) {
        for (struct addrinfo* a = list; a && fd < 0; a = a->ai_next) {
            if (a->ai_family != (i == 0 ? AF_INET6 : AF_INET)) { continue; }
            fd = tcp_listen_at_(a->ai_addr, a->ai_addrlen, backlog);
        }
    }
    freeaddrinfo(list);
    return fd;
}

// Where rank 0 listens: at the address of its host, and there alone. Everywhere, when no address of this name is of
// this machine (it stands behind another that passes connections on), or when the name, which others know by a real
// address, is a loopback address here, as Debian's /etc/hosts has it.
static inline int tcp_listen_master_(const char* host, int port, int size) {
    const int is_loopback = strncmp(host, "127.", 4) == 0 || strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0;
    const int backlog = 2 * size + TCP_WAITING;
    struct addrinfo* list = tcp_resolve_(host, port, 0);
    int fd = -1, error = EADDRNOTAVAIL;
    for (struct addrinfo* a = list; a && fd < 0; a = a->ai_next) {
        if (tcp_is_loopback_(a->ai_addr) != is_loopback) { continue; }
        fd = tcp_listen_at_(a->ai_addr, a->ai_addrlen, backlog);
        error = fd >= 0 ? 0 : errno == EAFNOSUPPORT ? EADDRNOTAVAIL : errno;
        if (error != EADDRNOTAVAIL) { break; }
    }
    freeaddrinfo(list);
    if (fd < 0 && error == EADDRNOTAVAIL && !is_loopback) {
        fd = tcp_listen_everywhere_(port, backlog);
        error = errno;
    }
    if (fd < 0) {
        const char* store = getenv("TORCHELASTIC_USE_AGENT_STORE");  // of torchrun, which then listens there itself
        const char* who = store && strcmp(store, "True") == 0
                              ? " (torchrun does: start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)"
                              : " (another run? choose another port)";
        fail_input("MASTER_ADDR=%s, MASTER_PORT=%d: rank 0 cannot listen there: %s%s", host, port, strerror(error),
                   error == EADDRINUSE ? who : "");
    }
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

// a connection to this address, or -1 with errno: nobody listens there (yet)
static inline int tcp_connect_(const TcpAddress* to, double deadline) {
    int on = 1, error = 0, fd = socket(to->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    socklen_t n_error = sizeof error;
    if (fd < 0) { return -1; }
    if (connect(fd, (const struct sockaddr*)&to->address, to->n_bytes) != 0) { error = errno; }
    if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        if (tcp_ready_(fd, POLLOUT, deadline)) { getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n_error); }
    }
    if (error != 0) {
        close(fd);
        errno = error;
        return -1;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

// who has connected, or -1 with errno
static inline int tcp_accept_(int listener) {
    int on = 1, fd = accept(listener, NULL, NULL);
    if (fd < 0) { return -1; }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

// ---- a file by which ranks meet ----

// What the file says; 0: it is not there yet, or not complete, and nothing is changed. Rank 0 replaces the file, so
// another than such a one is an error. Only its own user can write one that is believed, and read its secret.
static inline int tcp_read_file_(RankPlace* at, TcpMesh* m, const char* path) {
    char text[300], host[64], secret[65] = "";
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
    const int n_found = sscanf(text, "ranks meet at %63s port %d run %" SCNx64 " secret %64[0-9a-f]", host, &port,
                               &key, secret);
    if (n_found < 3 || port < 1 || port > 65535) {
        fail_input("%s: expected a file by which ranks meet, or none, found something else: choose another name", path);
    }
    if (status.st_uid != geteuid()) {
        fail_input("%s: expected a file of user %d, who starts this rank, found one of user %d: choose another name",
                   path, (int)geteuid(), (int)status.st_uid);
    }
    if (n_found < 4 || text[n - 1] != '\n') { return 0; }
    snprintf(at->host, sizeof at->host, "%s", host);
    at->port = port;
    m->run = key;
    snprintf(m->secret, sizeof m->secret, "%s", secret);
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

static inline void tcp_random_(void* bytes, size_t n) {
    if (getentropy(bytes, n) != 0) { fail_run("random numbers for a meeting: %s", strerror(errno)); }
}

// The file by which this run alone meets, locked while this process lives; what an earlier run has left is taken over.
// A file system without locks goes on without.
static inline int tcp_lock_file_(const char* path) {
    for (;;) {
        const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        if (fd < 0) { fail_input("%s, by which ranks meet: %s", path, strerror(errno)); }
        if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
            fail_input("%s: the ranks of another run are meeting by this file: choose another name", path);
        }
        if (file_has_name(fd, path)) { return fd; }
        close(fd);  // that other run has just removed it
    }
}

// rank 0 says where it listens, and draws the number and the secret by which its run is known; returns the open file
static inline int tcp_announce_(TcpMesh* m, const char* path, const char* host, int port) {
    RankPlace earlier;
    uint8_t bytes[SHA256_BYTES];
    char text[300];
    tcp_read_file_(&earlier, m, path);
    const int fd = tcp_lock_file_(path);
    tcp_random_(&m->run, sizeof m->run);
    tcp_random_(bytes, sizeof bytes);
    for (int i = 0; i < SHA256_BYTES; i++) { snprintf(m->secret + 2 * i, 3, "%02x", bytes[i]); }
    const int n = snprintf(text, sizeof text, "ranks meet at %s port %d run %016" PRIx64 " secret %s\n", host, port,
                           m->run, m->secret);
    const int is_ours = ftruncate(fd, 0) == 0 && fchmod(fd, 0600) == 0;  // before the secret is in it
    if (!is_ours || pwrite(fd, text, (size_t)n, 0) != n || fsync(fd) != 0) {
        fail_run("%s, by which ranks meet: %s", path, strerror(errno));
    }
    return fd;
}

// ... and removes that
static inline void tcp_withdraw_(const char* path, int fd) {
    if (file_has_name(fd, path)) { unlink(path); }
    close(fd);
}

// Waits for what rank 0 says next; 0: nothing, or the file (NULL: without one) has been replaced meanwhile, and who
// listens here was not our rank 0
static inline int tcp_await_(const TcpMesh* m, int fd, const char* file, double deadline) {
    RankPlace at;
    TcpMesh now = *m;
    while (tcp_now_() < deadline) {
        if (tcp_ready_(fd, POLLIN, file ? tcp_soon_(1.0, deadline) : deadline)) { return 1; }
        if (file && tcp_read_file_(&at, &now, file) && now.run != m->run) { return 0; }
    }
    return 0;
}

static inline uint64_t tcp_hash_(const char* text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *text; text++) { hash = (hash ^ (unsigned char)*text) * 0x100000001b3u; }
    return hash;
}

// ---- proofs ----

// of who has said this hello after that banner; `what` keeps the proofs of the two sides and of the codes apart
static inline void tcp_prove_(uint8_t proof[SHA256_BYTES], const TcpMesh* m, uint32_t what, const TcpBanner* banner,
                              const TcpHello* hello, const TcpAddress* list) {
    Hmac h;
    hmac_begin(&h, m->secret, strlen(m->secret));
    hmac_add(&h, &what, sizeof what);
    hmac_add(&h, banner, sizeof *banner);
    hmac_add(&h, hello, offsetof(TcpHello, proof));
    if (list) { hmac_add(&h, list, sizeof(TcpAddress) * (size_t)m->size); }
    hmac_end(&h, proof);
}

enum { TCP_PROOF_OF_HELLO = 100 };  // other than all codes

static inline int tcp_is_proven_(const TcpMesh* m, const TcpAnswer* answer, const TcpBanner* banner,
                                 const TcpHello* hello, const TcpAddress* list) {
    uint8_t proof[SHA256_BYTES];
    tcp_prove_(proof, m, answer->code, banner, hello, list);
    return hmac_is_equal(proof, answer->proof);
}

static inline TcpHello tcp_hello_(const TcpMesh* m, const TcpBanner* banner, int port, TcpChannel channel, int to) {
    TcpHello hello = {TCP_MAGIC, (uint32_t)channel, m->run, m->size, m->rank, (uint32_t)port, to, {0}, {0}};
    tcp_random_(hello.random, sizeof hello.random);
    tcp_prove_(hello.proof, m, TCP_PROOF_OF_HELLO, banner, &hello, NULL);
    return hello;
}

static inline int tcp_answer_(const TcpMesh* m, const TcpGuest* g, TcpCode code, const TcpAddress* list,
                              double deadline) {
    TcpAnswer answer = {TCP_MAGIC, (uint32_t)code, {0}};
    const int is_ours = code == TCP_WELCOME || code == TCP_STOPS;
    if (is_ours) { tcp_prove_(answer.proof, m, answer.code, &g->banner, &g->hello, list); }
    return tcp_write_(g->fd, &answer, sizeof answer, deadline) &&
           (!list || tcp_write_(g->fd, list, sizeof(TcpAddress) * (size_t)m->size, deadline));
}

// ---- the door: who connects to us, and proves to be a rank of this run ----

static inline void tcp_door_open_(TcpDoor* d, const TcpMesh* m, int listener) {
    memset(d, 0, sizeof *d);
    d->m = m;
    d->listener = listener;
    d->polled = (struct pollfd*)malloc_check(sizeof(struct pollfd) * (size_t)(1 + TCP_GUESTS + m->size), "connections");
}

static inline void tcp_door_drop_(TcpDoor* d, int i, int is_closed) {
    if (is_closed) { close(d->guest[i].fd); }
    memmove(&d->guest[i], &d->guest[i + 1], sizeof(TcpGuest) * (size_t)(--d->n_guests - i));
}

static inline void tcp_door_close_(TcpDoor* d) {
    while (d->n_guests > 0) { tcp_door_drop_(d, 0, 1); }
    free(d->polled);
}

// One newcomer gets a banner. Without descriptors or memory for more the oldest goes, and the others wait a moment: a
// listener that cannot accept is always ready, and asking it in a loop would be all we do.
static inline void tcp_door_accept_(TcpDoor* d) {
    const int fd = tcp_accept_(d->listener);
    if (fd < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED)) { return; }
    if (d->n_guests > 0 && (fd < 0 || d->n_guests == TCP_GUESTS)) { tcp_door_drop_(d, 0, 1); }
    if (fd < 0) {
        d->error = errno;
        d->shut_until = tcp_now_() + 0.05;
        return;
    }
    TcpGuest* g = &d->guest[d->n_guests++];
    memset(g, 0, sizeof *g);
    g->fd = fd;
    g->until = tcp_now_() + 5.0;
    g->banner.magic = TCP_MAGIC;
    g->banner.version = TCP_VERSION;
    tcp_random_(g->banner.random, sizeof g->banner.random);
    if (!tcp_write_(fd, &g->banner, sizeof g->banner, 0.0)) { tcp_door_drop_(d, d->n_guests - 1, 1); }
}

// what this guest has said since: 1: all, and it has proven it; 0: not all; -1: it can go
static inline int tcp_door_hear_(TcpDoor* d, TcpGuest* g) {
    uint8_t proof[SHA256_BYTES];
    const ssize_t n = recv(g->fd, (char*)&g->hello + g->n_read, sizeof g->hello - g->n_read, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) { return -1; }
    g->n_read += n > 0 ? (size_t)n : 0;
    if (g->n_read >= sizeof g->hello.magic && g->hello.magic != TCP_MAGIC) { return -1; }
    if (g->n_read < sizeof g->hello) { return 0; }
    tcp_prove_(proof, d->m, TCP_PROOF_OF_HELLO, &g->banner, &g->hello, NULL);
    const int same_run = g->hello.run == d->m->run, same_secret = hmac_is_equal(proof, g->hello.proof);
    if (same_run && same_secret) { return 1; }
    d->n_refused += same_run;
    tcp_answer_(d->m, g, same_run ? TCP_OTHER_SECRET : TCP_OTHER_RUN, NULL, 0.0);
    return -1;
}

// Until the deadline at most, and until one of the connections in `known` (-1: none) has something to read. 1: *rank is
// somebody who has proven to be a rank of this run, and its connection is now the caller's; 0: nobody, yet.
static inline int tcp_door_turn_(TcpDoor* d, TcpGuest* rank, const int* known, int n_known, double deadline) {
    const int n_guests = d->n_guests, is_shut = tcp_now_() < d->shut_until;
    for (int i = 0; i < 1 + n_guests + n_known; i++) {
        struct pollfd* p = &d->polled[i];
        p->fd = i == 0 ? (is_shut ? -1 : d->listener) : i <= n_guests ? d->guest[i - 1].fd : known[i - 1 - n_guests];
        p->events = POLLIN;
        p->revents = 0;
    }
    if (is_shut && d->shut_until < deadline) { deadline = d->shut_until; }
    if (n_guests > 0 && d->guest[0].until < deadline) { deadline = d->guest[0].until; }
    const double left = deadline - tcp_now_();
    const int n_ready = poll(d->polled, (nfds_t)(1 + n_guests + n_known),
                             left > 0.0 ? (int)(1000.0 * (left < 1e6 ? left : 1e6)) + 1 : 0);
    for (int i = n_guests - 1; i >= 0; i--) {  // from the last, for those after one that goes move up
        const int heard = n_ready > 0 && d->polled[1 + i].revents ? tcp_door_hear_(d, &d->guest[i]) : 0;
        if (heard == 1) { *rank = d->guest[i]; }
        if (heard != 0 || tcp_now_() > d->guest[i].until) { tcp_door_drop_(d, i, heard != 1); }
        if (heard == 1) { return 1; }
    }
    if (n_ready > 0 && d->polled[0].revents) { tcp_door_accept_(d); }
    return 0;
}

// ---- the meeting ----

// "2, 3, 5" of those without a connection
static inline void tcp_missing_(char* text, size_t n_text, const int* fd, int first, int n) {
    size_t used = 0;
    text[0] = '\0';
    for (int i = first; i < n && used + 16 < n_text; i++) {
        if (fd[i] < 0) { used += (size_t)snprintf(text + used, n_text - used, "%s%d", used ? ", " : "", i); }
    }
}

static inline int tcp_is_closed_(int fd) {
    char byte;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

// what rank 0 has at the meeting
typedef struct {
    const TcpMesh* m;
    TcpGuest* guest;  // for each rank
    int* fd;          // its connection, -1: it has not come
} TcpMeeting;

// tells those who are here that nothing comes of it, and stops
__attribute__((noreturn))
static inline void tcp_refuse_all_(const TcpMeeting* meeting, const char* text) {
    for (int i = 1; i < meeting->m->size; i++) {
        if (meeting->fd[i] >= 0) { tcp_answer_(meeting->m, &meeting->guest[i], TCP_STOPS, NULL, tcp_now_() + 1.0); }
    }
    fail_input("%s", text);
}

// rank 0: one rank of this run has come. A contradiction ends the start on all ranks.
static inline void tcp_admit_(TcpMeeting* meeting, const TcpGuest* g, TcpAddress* list) {
    const TcpMesh* m = meeting->m;
    const TcpHello* h = &g->hello;
    char text[400] = "";
    if (h->channel != TCP_MEETING || h->to != 0) {
        close(g->fd);
        return;
    }
    const int known = h->rank > 0 && h->rank < m->size, is_here = known && meeting->fd[h->rank] >= 0;
    if (h->size != m->size) {
        snprintf(text, sizeof text, "rank 0 was started for %d ranks, rank %d for %d", m->size, h->rank, h->size);
    } else if (!known || (is_here && !tcp_is_closed_(meeting->fd[h->rank]))) {
        snprintf(text, sizeof text, "two processes say that they are rank %d of %d", h->rank, m->size);
    }
    if (*text) {
        tcp_answer_(m, g, TCP_STOPS, NULL, tcp_now_() + 1.0);
        tcp_refuse_all_(meeting, text);
    }
    if (is_here) { close(meeting->fd[h->rank]); }
    meeting->fd[h->rank] = g->fd;
    meeting->guest[h->rank] = *g;
    TcpAddress* a = &list[h->rank];
    memset(a, 0, sizeof *a);
    a->n_bytes = sizeof a->address;
    if (getpeername(g->fd, (struct sockaddr*)&a->address, &a->n_bytes) != 0) {
        fail_run("address of rank %d: %s", h->rank, strerror(errno));
    }
    tcp_set_port_(a, h->port);
}

// the time is up: who is missing, and what may be the reason
__attribute__((noreturn))
static inline void tcp_gather_late_(const TcpMeeting* meeting, const TcpDoor* d, const char* missing, double timeout) {
    char text[600];
    int n = snprintf(text, sizeof text, "after %.0f s these of %d ranks have not come: %s", timeout, meeting->m->size,
                     missing);
    if (d->n_refused > 0) {
        n += snprintf(text + n, sizeof text - (size_t)n, " (%d that came had another secret, LLMC_SECRET, or none)",
                      d->n_refused);
    }
    if (d->error != 0) {
        snprintf(text + n, sizeof text - (size_t)n, " (connections could not be taken: %s)", strerror(d->error));
    }
    tcp_refuse_all_(meeting, text);
}

// Rank 0 waits for all, then everyone gets the list. The connections stay in meeting.fd until the ranks have reached
// each other.
static inline void tcp_gather_(TcpMeeting* meeting, int listener, TcpAddress* list, double timeout) {
    const TcpMesh* m = meeting->m;
    double deadline = tcp_now_() + timeout;
    char missing[200];
    TcpDoor door;
    tcp_door_open_(&door, m, listener);
    for (;;) {
        TcpGuest g;
        for (int i = 1; i < m->size; i++) {  // it has nothing to say: one that has left may come again
            if (meeting->fd[i] < 0 || !tcp_ready_(meeting->fd[i], POLLIN, 0.0)) { continue; }
            close(meeting->fd[i]);
            meeting->fd[i] = -1;
        }
        tcp_missing_(missing, sizeof missing, meeting->fd, 1, m->size);
        if (!*missing) { break; }
        if (tcp_now_() >= deadline) { tcp_gather_late_(meeting, &door, missing, timeout); }
        if (tcp_door_turn_(&door, &g, meeting->fd + 1, m->size - 1, deadline)) { tcp_admit_(meeting, &g, list); }
    }
    tcp_door_close_(&door);
    for (int i = 1; i < m->size; i++) {
        const int good = tcp_answer_(m, &meeting->guest[i], TCP_WELCOME, list, tcp_now_() + 5.0);
        if (!good) { fail_run("rank %d left before all ranks had met", i); }
    }
}

// Says hello to whoever listens at the other end, and hears the answer, which may come when all ranks have met. 0:
// there was none. list: to be filled by rank 0 at the meeting, else NULL
static inline int tcp_introduce_(const TcpMesh* m, int fd, const char* file, int port, TcpChannel channel, int to,
                                 TcpAnswer* answer, int* is_proven, TcpAddress* list, double deadline) {
    TcpBanner banner;
    // our rank 0 says something at once; at the meeting its last words may come a little after our own time is up
    const double patience = channel == TCP_MEETING ? deadline + 5.0 : deadline;
    memset(answer, 0, sizeof *answer);
    *is_proven = 0;
    if (!tcp_await_(m, fd, file, deadline)) { return 0; }
    if (!tcp_read_(fd, &banner, sizeof banner, tcp_soon_(5.0, deadline))) { return 0; }
    if (banner.magic != TCP_MAGIC || banner.version != TCP_VERSION) { return 1; }
    const TcpHello hello = tcp_hello_(m, &banner, port, channel, to);
    if (!tcp_write_(fd, &hello, sizeof hello, deadline) || !tcp_await_(m, fd, file, patience) ||
        !tcp_read_(fd, answer, sizeof *answer, tcp_now_() + 5.0)) {
        return 0;
    }
    const int has_list = list && answer->magic == TCP_MAGIC && answer->code == TCP_WELCOME;
    if (has_list && !tcp_read_(fd, list, sizeof(TcpAddress) * (size_t)m->size, tcp_now_() + 5.0)) { return 0; }
    *is_proven = tcp_is_proven_(m, answer, &banner, &hello, has_list ? list : NULL);
    return 1;
}

// One attempt of another rank: the connection when the list has come, else -1. With a file it may be in vain: who
// listens there is not our rank 0, or a machine that is gone keeps silent.
static inline int tcp_join_once_(const TcpMesh* m, const RankPlace* place, const char* file, int* listener,
                                 TcpAddress* list, double deadline) {
    struct addrinfo* found = tcp_resolve_(place->host, place->port, 0);
    TcpAddress master, own;
    TcpAnswer answer;
    int fd = -1, is_proven;
    for (struct addrinfo* a = found; a && fd < 0; a = a->ai_next) {
        memset(&master, 0, sizeof master);
        memcpy(&master.address, a->ai_addr, a->ai_addrlen);
        master.n_bytes = a->ai_addrlen;
        fd = tcp_connect_(&master, file ? tcp_soon_(3.0, deadline) : deadline);
    }
    freeaddrinfo(found);
    if (fd < 0) { return -1; }
    own.n_bytes = sizeof own.address;
    if (getsockname(fd, (struct sockaddr*)&own.address, &own.n_bytes) != 0) {
        fail_run("own address: %s", strerror(errno));
    }
    tcp_set_port_(&own, 0);
    if (*listener < 0) {
        *listener = tcp_listen_at_((struct sockaddr*)&own.address, own.n_bytes, 2 * m->size + TCP_WAITING);
    }
    if (*listener < 0) { fail_run("rank %d cannot listen: %s", m->rank, strerror(errno)); }
    const int has_answer = tcp_introduce_(m, fd, file, tcp_port_(*listener), TCP_MEETING, 0, &answer, &is_proven, list,
                                          deadline);
    if (has_answer && is_proven && answer.code == TCP_WELCOME) {
        list[0] = master;
        return fd;
    }
    if (has_answer && is_proven && answer.code == TCP_STOPS) { exit(2); }  // rank 0 of our run says it
    if (has_answer && !file) {
        if (answer.magic == TCP_MAGIC && answer.code == TCP_OTHER_RUN) {
            fail_input("another run's rank 0 listens at this MASTER_ADDR and MASTER_PORT: choose another port");
        }
        if (answer.magic == TCP_MAGIC) {
            fail_input("%s:%d: rank 0 has another secret than rank %d, or one of them has none: set LLMC_SECRET to the "
                       "same text on all ranks", place->host, place->port, m->rank);
        }
        fail_input("%s:%d: this is not rank 0 of a run", place->host, place->port);
    }
    close(fd);
    return -1;
}

// another rank: its connection to rank 0, and in *listener where it listens itself
static inline int tcp_join_(TcpMesh* m, const RankPlace* place, int* listener, TcpAddress* list, double timeout) {
    const char* file = place_has_file(place) ? place->host : NULL;
    double deadline = tcp_now_() + timeout;
    struct timespec pause = {0, 20000000};
    RankPlace at = *place;  // with a file: what it says
    *listener = -1;
    for (;;) {
        const int is_known = !file || tcp_read_file_(&at, m, file);
        const int fd = is_known ? tcp_join_once_(m, &at, file, listener, list, deadline) : -1;
        if (fd >= 0) { return fd; }
        if (tcp_now_() > deadline && file && at.port == 0) {
            fail_run("%s: rank 0 has not written this file within %.0f s: was it started, and do both machines see the "
                     "folder?", file, timeout);
        }
        if (tcp_now_() > deadline) {
            fail_run("rank 0 did not answer at %s:%d%s%s within %.0f s: was it started, and can this machine reach it?",
                     at.host, at.port, file ? ", as says " : "", file ? file : "", timeout);
        }
        // it takes one address, and the next attempt may leave by another interface
        if (*listener >= 0) { close(*listener); }
        *listener = -1;
        nanosleep(&pause, NULL);
        pause.tv_nsec = pause.tv_nsec < 500000000 ? 2 * pause.tv_nsec : pause.tv_nsec;
    }
}

// ---- everyone with everyone ----

// 1: a note from this peer; -1: it is gone without one; 0: neither, within `seconds`
static inline int tcp_read_note(const TcpMesh* m, int peer, TcpNote* note, double seconds) {
    double deadline = tcp_now_() + seconds;
    if (!tcp_ready_(m->control[peer], POLLIN, deadline)) { return 0; }
    if (!tcp_read_(m->control[peer], note, sizeof *note, deadline + 1.0)) { return -1; }
    if (note->rank < 0 || note->rank >= m->size || note->status < 1 || note->status > 255) { return -1; }
    note->text[sizeof note->text - 1] = '\0';
    return 1;
}

// The ranks do not reach each other. Like a call of comm.h we are silent when one of them has stopped for a mistake of
// the user, which it says; the note of that may be on its way yet.
__attribute__((noreturn, format(printf, 2, 3)))
static inline void tcp_give_up_(const TcpMesh* m, const char* format, ...) {
    const double deadline = tcp_now_() + 1.0;
    char text[400];
    TcpNote note;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (int i = 0; i < m->size; i++) {
        const double left = deadline - tcp_now_();
        const int has_note = m->control[i] >= 0 && tcp_read_note(m, i, &note, left > 0.0 ? left : 0.0) == 1;
        if (has_note && note.status == 2) { exit(2); }
    }
    fail_run("%s", text);
}

// to a rank below, again if it has no room for us yet. It listened before it came to the meeting, so one that refuses
// has died since.
static inline int tcp_reach_(const TcpMesh* m, int to, TcpChannel channel, const TcpAddress* address, double deadline) {
    const struct timespec pause = {0, 20000000};
    TcpAnswer answer;
    int is_proven;
    const int family = address->address.ss_family;
    if ((family != AF_INET && family != AF_INET6) || address->n_bytes > sizeof address->address) {
        fail_run("rank %d: rank 0 has sent no address of rank %d", m->rank, to);
    }
    for (;;) {
        const int fd = tcp_connect_(address, deadline);
        const int error = fd < 0 ? errno : ETIMEDOUT;
        const int has_answer = fd >= 0 && tcp_introduce_(m, fd, NULL, 0, channel, to, &answer, &is_proven, NULL,
                                                         deadline);
        if (has_answer && is_proven && answer.code == TCP_WELCOME) { return fd; }
        if (has_answer) { fail_run("rank %d: who listens at the address of rank %d is another", m->rank, to); }
        if (fd < 0 || tcp_now_() > deadline) {
            char host[64] = "?";
            getnameinfo((const struct sockaddr*)&address->address, address->n_bytes, host, sizeof host, NULL, 0,
                        NI_NUMERICHOST);
            tcp_give_up_(m, "rank %d cannot reach rank %d at %s: %s", m->rank, to, host, strerror(error));
        }
        close(fd);
        nanosleep(&pause, NULL);
    }
}

// one of those above has come: where does its connection belong?
static inline void tcp_place_(TcpMesh* m, const TcpGuest* g) {
    const TcpHello* h = &g->hello;
    const int good = h->to == m->rank && h->size == m->size && h->rank > m->rank && h->rank < m->size &&
                     (h->channel == TCP_DATA || h->channel == TCP_CONTROL);
    int* slot = !good ? NULL : h->channel == TCP_DATA ? &m->data[h->rank] : &m->control[h->rank];
    if (slot && *slot >= 0 && tcp_is_closed_(*slot)) {  // it did not hear the answer, and comes again
        close(*slot);
        *slot = -1;
    }
    if (!slot || *slot >= 0 || !tcp_answer_(m, g, TCP_WELCOME, NULL, tcp_now_() + 1.0)) {
        close(g->fd);
        return;
    }
    *slot = g->fd;
}

// is the other side gone, whatever it has left for us to read?
static inline int tcp_is_gone_(int fd) {
    struct pollfd p = {fd, POLLRDHUP, 0};
    return poll(&p, 1, 0) == 1;
}

// Connections by which we notice that a rank dies, or stops, while we wait for others: control, until then that of the
// meeting. -1: none, or it has left a note, which is read when it is gone
static inline void tcp_watched_(const TcpMesh* m, const int* meeting, int* watched) {
    for (int i = 0; i < m->size; i++) {
        watched[i] = m->control[i] >= 0 ? m->control[i] : meeting[i];
        if (watched[i] < 0 || !tcp_ready_(watched[i], POLLIN, 0.0)) { continue; }
        if (tcp_is_gone_(watched[i])) {
            tcp_give_up_(m, "rank %d left before rank %d was connected to all", i, m->rank);
        }
        watched[i] = -1;
    }
}

// data and control to every rank below, then from every rank above. meeting: connections that ranks have from there
static inline void tcp_connect_all_(TcpMesh* m, int listener, const TcpAddress* list, const int* meeting,
                                    double deadline) {
    char missing[200];
    TcpDoor door;
    for (int i = 0; i < m->rank; i++) {
        m->data[i] = tcp_reach_(m, i, TCP_DATA, &list[i], deadline);
        m->control[i] = tcp_reach_(m, i, TCP_CONTROL, &list[i], deadline);
    }
    int* watched = (int*)malloc_check(sizeof(int) * (size_t)m->size, "connections");
    tcp_door_open_(&door, m, listener);
    for (;;) {
        TcpGuest g;
        tcp_missing_(missing, sizeof missing, m->data, m->rank + 1, m->size);
        if (!*missing) { tcp_missing_(missing, sizeof missing, m->control, m->rank + 1, m->size); }
        if (!*missing) { break; }
        tcp_watched_(m, meeting, watched);
        if (tcp_now_() > deadline) { tcp_give_up_(m, "rank %d: no connection from these ranks: %s", m->rank, missing); }
        if (tcp_door_turn_(&door, &g, watched, m->size, tcp_soon_(0.1, deadline))) { tcp_place_(m, &g); }
    }
    tcp_door_close_(&door);
    free(watched);
}

// How rank 0 listens: 1 when only this machine can connect
static inline int tcp_is_private_(int listener) {
    TcpAddress a;
    a.n_bytes = sizeof a.address;
    return getsockname(listener, (struct sockaddr*)&a.address, &a.n_bytes) == 0 &&
           tcp_is_loopback_((struct sockaddr*)&a.address);
}

// Rank 0: listens, waits for all, and knows by meeting->fd who is still there
static inline int tcp_host_(TcpMesh* m, TcpMeeting* meeting, const RankPlace* place, const char* file, TcpAddress* list,
                            double timeout) {
    char own[64];
    if (file) { tcp_own_address_(own); }
    const int listener = tcp_listen_master_(file ? own : place->host, place->port, m->size);
    const int announced = file ? tcp_announce_(m, file, own, tcp_port_(listener)) : -1;
    if (!*m->secret && !tcp_is_private_(listener)) {
        warn_line("any program that reaches %s:%d can join or end this run while its ranks meet: set LLMC_SECRET to "
                  "the same random text on all ranks (openssl rand -hex 16)", place->host, place->port);
    }
    tcp_gather_(meeting, listener, list, timeout);
    if (file) { tcp_withdraw_(file, announced); }
    return listener;
}

// the time limit is for all ranks to come; those that come at its end have 10 s to reach each other
static inline void tcp_open(TcpMesh* m, const RankPlace* place, double timeout) {
    const size_t n = (size_t)place->size;
    const double deadline = tcp_now_() + timeout;
    memset(m, 0, sizeof *m);
    m->rank = place->rank;
    m->size = place->size;
    m->run = tcp_hash_(place->run_id);
    snprintf(m->secret, sizeof m->secret, "%s", place->secret);
    m->data = (int*)malloc_check(3 * n * sizeof(int), "connections");
    m->control = m->data + n;
    memset(m->data, 0xff, 3 * n * sizeof(int));
    TcpMeeting meeting = {m, (TcpGuest*)malloc_check(n * sizeof(TcpGuest), "connections"), m->control + n};
    TcpAddress* list = (TcpAddress*)calloc(n, sizeof(TcpAddress));
    if (!list) { fail_run("no memory for %zu addresses", n); }
    const char* file = place_has_file(place) ? place->host : NULL;
    char parent[PATH_BYTES];
    int listener;
    if (file && access(path_parent(parent, file), m->rank == 0 ? W_OK : F_OK) != 0) {
        fail_input("%s: ranks cannot meet by this file: %s: %s", file, parent, strerror(errno));
    }
    if (m->rank == 0) { listener = tcp_host_(m, &meeting, place, file, list, timeout); }
    else { meeting.fd[0] = tcp_join_(m, place, &listener, list, timeout); }
    const double soon = tcp_now_() + 10.0;
    tcp_connect_all_(m, listener, list, meeting.fd, soon > deadline ? soon : deadline);
    for (int i = 0; i < m->size; i++) {
        if (meeting.fd[i] >= 0) { close(meeting.fd[i]); }
    }
    close(listener);
    free(meeting.guest);
    free(list);
    explicit_bzero(m->secret, sizeof m->secret);
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
static inline ssize_t tcp_send(const TcpMesh* m, int peer, const void* head, size_t n_head, const void* data,
                               size_t n) {
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
#endif  // LLMC_COMM_TCP_H
