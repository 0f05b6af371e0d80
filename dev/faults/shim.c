/*
Faults on purpose: system calls and allocations of a trainer that fail, or after which the process is gone. The product has
no line of this; the Makefile links train_*_faults with `--wrap`, so that its calls of open, write, ... come here first.
    FAULT=exit:N      the process ends (no handler, no flush) before the N-th file call, which is after the one before it
    FAULT=torn:N      the N-th write hands over half of its bytes, and the process ends
    FAULT=short:N     the N-th write accepts half of its bytes
    FAULT=enospc:N    the disk is full from the N-th file call on: whatever takes space fails
    FAULT=eio:N       the N-th file call fails with EIO, once
    FAULT=term:N      SIGTERM arrives at the N-th file call
    FAULT=nomem:N     the N-th allocation fails, once
    FAULT=nomem:0     every allocation fails, each in a child forked for it, which must end with status 1 and one line on
                      stderr (and removes nothing, for its parent goes on); the counts are printed at the end
    FAULT=flip:N      a bit of the parameters has flipped when the N-th sum with a seed is made of them (llmc/ranks/replicas.h)
    FAULT=count:0     at the end: the numbers of file calls, writes and allocations, on stderr
With FAULT_NO_EXCHANGE=1 renameat2 says EINVAL, as file systems do that cannot exchange two names. The clock runs 200 times
as fast: the trainer's 0.2 s of measuring the machine take a millisecond. Calls are counted from 1, over the whole process.
Used by dev/test_faults.sh; what a run must do then: doc/checkpoints.md
*/
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

typedef enum { CLOSES, READS, TAKES_SPACE } Kind;  // of file call

static struct {
    char kind[16];
    long at;
    int no_exchange;
    atomic_long n_files, n_writes, n_allocations, n_bad, n_sums;
    int in_child;  // one that was forked to see an allocation fail
} fault;

// the last of the exit handlers; a child leaves before stdio moves the offsets of files that its parent reads
static void report(int status, void* nothing) {
    long n = atomic_load(&fault.n_allocations);
    (void)nothing;
    if (fault.in_child) { _exit(status); }
    if (strcmp(fault.kind, "count") == 0) { fprintf(stderr, "%ld %ld %ld\n", atomic_load(&fault.n_files), atomic_load(&fault.n_writes), n); }
    if (strcmp(fault.kind, "nomem") != 0 || fault.at != 0) { return; }
    fprintf(stderr, "%ld allocations failed, %ld of them badly\n", n, atomic_load(&fault.n_bad));
}

__attribute__((constructor)) static void read_environment(void) {
    const char* text = getenv("FAULT");
    if (text && sscanf(text, "%15[a-z]:%ld", fault.kind, &fault.at) != 2) {
        fprintf(stderr, "FAULT: expected kind:number, found \"%s\"\n", text);
        exit(2);
    }
    fault.no_exchange = getenv("FAULT_NO_EXCHANGE") != NULL;
    on_exit(report, NULL);
}

static int is(const char* kind) { return strcmp(fault.kind, kind) == 0; }

// counts a file call; 0: let it through; 1: fail with errno; 2: do half of it; 3: half of it, then the end
static int strikes(Kind kind) {
    long n = atomic_fetch_add(&fault.n_files, 1) + 1;
    if (is("exit") && n == fault.at) { _exit(99); }
    if (is("term") && n == fault.at) { raise(SIGTERM); }
    if (is("eio") && n == fault.at) { errno = EIO; return 1; }
    if (is("enospc") && n >= fault.at && kind == TAKES_SPACE) { errno = ENOSPC; return 1; }
    return 0;
}

// the same for a write of n_bytes, of which *n are to be written
static int write_strikes(size_t n_bytes, size_t* n) {
    int verdict = strikes(TAKES_SPACE), struck = atomic_fetch_add(&fault.n_writes, 1) + 1 == fault.at && (is("short") || is("torn"));
    *n = struck && n_bytes > 1 ? n_bytes / 2 : n_bytes;
    return struck ? 2 + is("torn") : verdict;
}

#define WRAP(result, name, ...)            \
    result __real_##name(__VA_ARGS__);     \
    result __wrap_##name(__VA_ARGS__);     \
    result __wrap_##name(__VA_ARGS__)

// ---- file calls ----

int __real_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...);
int __wrap_open(const char* path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return strikes(flags & O_CREAT ? TAKES_SPACE : READS) == 1 ? -1 : __real_open(path, flags, mode);
}

WRAP(ssize_t, write, int fd, const void* data, size_t n_bytes) {
    size_t n;
    int verdict = write_strikes(n_bytes, &n);
    if (verdict == 1) { return -1; }
    ssize_t written = __real_write(fd, data, n);
    if (verdict == 3) { _exit(99); }
    return written;
}

WRAP(ssize_t, pwrite, int fd, const void* data, size_t n_bytes, off_t offset) {
    size_t n;
    int verdict = write_strikes(n_bytes, &n);
    if (verdict == 1) { return -1; }
    ssize_t written = __real_pwrite(fd, data, n, offset);
    if (verdict == 3) { _exit(99); }
    return written;
}

WRAP(ssize_t, read, int fd, void* data, size_t n_bytes) { return strikes(READS) == 1 ? -1 : __real_read(fd, data, n_bytes); }
WRAP(int, fsync, int fd) { return strikes(TAKES_SPACE) == 1 ? -1 : __real_fsync(fd); }
WRAP(int, close, int fd) { return strikes(CLOSES) == 1 ? (__real_close(fd), errno = EIO, -1) : __real_close(fd); }
WRAP(int, rename, const char* from, const char* to) { return fault.in_child ? 0 : strikes(TAKES_SPACE) == 1 ? -1 : __real_rename(from, to); }
WRAP(int, renameat2, int from_fd, const char* from, int to_fd, const char* to, unsigned flags) {
    if (fault.no_exchange) { errno = EINVAL; return -1; }
    return strikes(TAKES_SPACE) == 1 ? -1 : __real_renameat2(from_fd, from, to_fd, to, flags);
}
WRAP(int, unlink, const char* path) { return fault.in_child ? 0 : strikes(READS) == 1 ? -1 : __real_unlink(path); }
WRAP(int, rmdir, const char* path) { return fault.in_child ? 0 : strikes(READS) == 1 ? -1 : __real_rmdir(path); }
WRAP(int, mkdir, const char* path, mode_t mode) { return strikes(TAKES_SPACE) == 1 ? -1 : __real_mkdir(path, mode); }
WRAP(int, ftruncate, int fd, off_t length) { return strikes(READS) == 1 ? -1 : __real_ftruncate(fd, length); }
WRAP(int, truncate, const char* path, off_t length) { return strikes(READS) == 1 ? -1 : __real_truncate(path, length); }
WRAP(FILE*, fopen, const char* path, const char* mode) { return strikes(*mode == 'r' ? READS : TAKES_SPACE) == 1 ? NULL : __real_fopen(path, mode); }
WRAP(int, fflush, FILE* file) { return strikes(TAKES_SPACE) == 1 ? EOF : __real_fflush(file); }
WRAP(int, fclose, FILE* file) { return strikes(TAKES_SPACE) == 1 ? (__real_fclose(file), errno = is("eio") ? EIO : ENOSPC, EOF) : __real_fclose(file); }

// ---- allocations ----

// how a child ended: with status 1 and one line?
static void judge(pid_t child, int pipe_end, long n) {
    char text[8192];
    size_t used = 0, n_lines = 0;
    int status = 0;
    for (ssize_t k; (k = __real_read(pipe_end, text + used, sizeof text - 1 - used)) > 0;) { used += (size_t)k; }
    text[used] = '\0';
    waitpid(child, &status, 0);
    for (size_t i = 0; i < used; i++) { n_lines += text[i] == '\n'; }
    if (WIFEXITED(status) && WEXITSTATUS(status) == 1 && n_lines == 1) { return; }
    atomic_fetch_add(&fault.n_bad, 1);
    fprintf(stderr, "allocation %ld: wait status %d: %s\n", n, status, text);
}

static int no_memory(void) {
    int ends[2];
    long n = atomic_fetch_add(&fault.n_allocations, 1) + 1;
    if (!is("nomem") || fault.in_child || (fault.at > 0 && n != fault.at)) { return 0; }
    errno = ENOMEM;
    if (fault.at > 0) { return 1; }
    if (pipe(ends) != 0) { abort(); }
    pid_t child = fork();
    if (child == 0) {
        fault.in_child = 1;
        dup2(ends[1], STDERR_FILENO);
        dup2(__real_open("/dev/null", O_WRONLY), STDOUT_FILENO);
        __real_close(ends[1]);
        errno = ENOMEM;
        return 1;
    }
    __real_close(ends[1]);
    judge(child, ends[0], n);
    __real_close(ends[0]);
    return 0;
}

WRAP(void*, malloc, size_t n_bytes) { return no_memory() ? NULL : __real_malloc(n_bytes); }
WRAP(void*, calloc, size_t n, size_t n_bytes) { return no_memory() ? NULL : __real_calloc(n, n_bytes); }
WRAP(void*, realloc, void* old, size_t n_bytes) { return no_memory() ? NULL : __real_realloc(old, n_bytes); }
WRAP(int, posix_memalign, void** p, size_t alignment, size_t n_bytes) { return no_memory() ? ENOMEM : __real_posix_memalign(p, alignment, n_bytes); }
WRAP(void*, mmap, void* at, size_t n_bytes, int access, int flags, int fd, off_t offset) {
    return no_memory() ? MAP_FAILED : __real_mmap(at, n_bytes, access, flags, fd, offset);
}
WRAP(FILE*, open_memstream, char** text, size_t* n_bytes) { return no_memory() ? NULL : __real_open_memstream(text, n_bytes); }

// ---- memory ----

WRAP(XXH64_hash_t, XXH3_64bits_withSeed, const void* x, size_t n_bytes, XXH64_hash_t seed) {
    if (atomic_fetch_add(&fault.n_sums, 1) + 1 == fault.at && is("flip") && n_bytes > 0) { ((unsigned char*)x)[n_bytes / 2] ^= 4; }
    return __real_XXH3_64bits_withSeed(x, n_bytes, seed);
}

// ---- the clock ----

WRAP(int, clock_gettime, clockid_t clock, struct timespec* t) {
    int failed = __real_clock_gettime(clock, t);
    if (clock != CLOCK_MONOTONIC) { return failed; }
    long long ns = 200 * (1000000000LL * t->tv_sec + t->tv_nsec);
    t->tv_sec = ns / 1000000000;
    t->tv_nsec = ns % 1000000000;
    return failed;
}
