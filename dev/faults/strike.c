/*
A rank that dies or stands still on purpose, for dev/test_ranks.sh, and clocks that somebody sets. It is preloaded into
trainers as users run them (LD_PRELOAD); their calls that send, write, open, name and sync come here first.
    STRIKE=kill:N       SIGKILL before the N-th of these calls
    STRIKE=stop:N       SIGSTOP before the N-th, until somebody continues it
    STRIKE=count:PATH   their number at the end, into this file
    CLOCKS=1            the time of day is a day ahead, a day back, and so on, at each question; the monotonic clock is as
                        it was
*/
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static struct {
    char kind[8], path[4096];
    long at;
    int jumps;
    atomic_long n_calls, n_asked;
} strike;

__attribute__((constructor)) static void begin(void) {
    const char* text = getenv("STRIKE");
    strike.jumps = getenv("CLOCKS") != NULL;
    if (!text) { return; }
    sscanf(text, "%7[a-z]:%4095s", strike.kind, strike.path);
    strike.at = strcmp(strike.kind, "count") == 0 ? 0 : atol(strike.path);
}

__attribute__((destructor)) static void end(void) {
    if (strcmp(strike.kind, "count") != 0) { return; }
    FILE* f = fopen(strike.path, "w");
    if (f) {
        fprintf(f, "%ld\n", atomic_load(&strike.n_calls));
        fclose(f);
    }
}

static void strikes(void) {
    const int error = errno;
    const long n = atomic_fetch_add(&strike.n_calls, 1) + 1;
    if (strike.at > 0 && n == strike.at) { kill(getpid(), strike.kind[0] == 'k' ? SIGKILL : SIGSTOP); }
    errno = error;
}

// the function that ours stands before
#define REAL(result, name, ...) result (*real)(__VA_ARGS__) = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define BEFORE(result, name, parameters, types, arguments)                             \
    result name parameters {                                                           \
        static result(*real) types;                                                    \
        if (!real) { real = (result(*) types)dlsym(RTLD_NEXT, #name); }                \
        strikes();                                                                     \
        return real arguments;                                                         \
    }

BEFORE(ssize_t, sendmsg, (int fd, const struct msghdr* m, int flags), (int, const struct msghdr*, int), (fd, m, flags))
BEFORE(ssize_t, send, (int fd, const void* p, size_t n, int flags), (int, const void*, size_t, int), (fd, p, n, flags))
BEFORE(ssize_t, write, (int fd, const void* p, size_t n), (int, const void*, size_t), (fd, p, n))
BEFORE(int, fsync, (int fd), (int), (fd))
BEFORE(int, rename, (const char* a, const char* b), (const char*, const char*), (a, b))
BEFORE(int, renameat2, (int a, const char* b, int c, const char* d, unsigned e),
       (int, const char*, int, const char*, unsigned), (a, b, c, d, e))
BEFORE(int, unlink, (const char* path), (const char*), (path))

int open(const char* path, int flags, ...) {
    REAL(int, open, const char*, int, ...);
    va_list args;
    va_start(args, flags);
    const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    strikes();
    return real(path, flags, mode);
}

static time_t jump(void) {
    const time_t day = 24 * 3600;
    return !strike.jumps ? 0 : atomic_fetch_add(&strike.n_asked, 1) % 2 ? -day : day;
}

int clock_gettime(clockid_t clock, struct timespec* t) {
    REAL(int, clock_gettime, clockid_t, struct timespec*);
    const int status = real(clock, t);
    if (clock == CLOCK_REALTIME) { t->tv_sec += jump(); }
    return status;
}

int gettimeofday(struct timeval* restrict t, void* restrict zone) {
    REAL(int, gettimeofday, struct timeval*, void*);
    const int status = real(t, zone);
    t->tv_sec += jump();
    return status;
}

time_t time(time_t* t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t) { *t = now.tv_sec; }
    return now.tv_sec;
}
