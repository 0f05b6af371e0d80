/*
How a program of this project stops: one clear line on stderr, then an exit status that says whose fault it was.
    fail_input  status 2: what the user gave is wrong (option, file, data); nothing was changed
    fail_run    status 1: the run could not go on (disk, memory, non-finite numbers, lost rank)
    warn_line   the same line, and the program goes on
    warn_alike  of several processes that find the same, as in a file that all read, the first says it
    standard_files_open   descriptors 0, 1 and 2 are open, and no limit on file sizes kills: called before any file is
A message says what, where, expected, found and, where there is one, the remedy; no newline, no "Error:" in front.
    train_gpt2: --batch-size: expected an integer 1..65536, found "4x"
`assert` stays for our own mistakes; anything a user typed or a file contained comes here.
Beside the main thread a job of background.h may fail, and both at once. Only the first of them says why, and only the
main thread ends the process: a job that fails stands still until the main thread asks (fail_check), waits for it, or
fails too. So there is one line and one exit, whose handlers run while nobody else writes, and never in the middle of a
line of the log.
Of several processes that train one model and find the same error of the user, one says it: before fail_input speaks it
asks the function in Failure.is_said_elsewhere (comm.h has one). A process whose line another one says ends with status
2, silent.
*/
#ifndef LLMC_FAIL_H
#define LLMC_FAIL_H
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C"
#else
extern
#endif
char* program_invocation_short_name;  // the C library's; declared here, for errno.h hides it when included before us

// control characters, which could break a line or drive a terminal, become "?"; in UTF-8 also U+0080 to U+009F
static inline void plain_text(char* text) {
    for (unsigned char* c = (unsigned char*)text; *c; c++) {
        if (*c < ' ' || *c == 127) { *c = '?'; }
        if (c[0] == 0xc2 && c[1] >= 0x80 && c[1] < 0xa0) { c[0] = c[1] = '?'; }
    }
}

// Descriptors 0, 1 and 2 are open from here on. Started without them, a program would give their numbers to its next
// files, and print into these. A write beyond a limit on file sizes fails, with its message, where SIGXFSZ would kill
static inline void standard_files_open(void) {
    signal(SIGXFSZ, SIG_IGN);
    for (int fd = open("/dev/null", O_RDWR); fd >= 0; fd = open("/dev/null", O_RDWR)) {
        if (fd > 2) {
            close(fd);
            return;
        }
    }
}

// ---- who says it, and who ends the process ----

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t job_ended;  // background.h waits for it
    int status;                // exit status of the first failure; 0: nothing has failed
    int job_failed;            // a job stands still for ever
    int silent;                // another process says it (options.h)
    int (*is_said_elsewhere)(void* context, const char* line);  // does another process say this line of fail_input?
    void* context;
    int follows;               // another process says what all find alike
} Failure;

// a state of the process, as its end is
static inline Failure* failure_(void) {
    static Failure failure = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, NULL, NULL, 0};
    return &failure;
}

// is this thread a job of background.h?
static inline int* failure_in_job_(void) {
    static __thread int in_job;
    return &in_job;
}

enum { FAIL_LINE_BYTES = 4096 };

static inline void fail_line_(const char* line) {
    if (!*failure_in_job_()) { fflush(stdout); }  // beside a job the main thread may be in the middle of a line
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, line);
}

static inline void fail_format_(char line[FAIL_LINE_BYTES], const char* format, va_list args) {
    vsnprintf(line, FAIL_LINE_BYTES, format, args);
    plain_text(line);
}

// a job's line is not asked about: the answer would come by connections that the main thread uses
static inline int fail_is_said_(const Failure* f, int status, const char* line) {
    if (f->silent) { return 1; }
    return status == 2 && f->is_said_elsewhere && !*failure_in_job_() && f->is_said_elsewhere(f->context, line);
}

__attribute__((noreturn))
static inline void fail_end_(int status, const char* format, va_list args) {
    Failure* f = failure_();
    char line[FAIL_LINE_BYTES];
    pthread_mutex_lock(&f->lock);
    if (f->status == 0) {
        fail_format_(line, format, args);
        if (!fail_is_said_(f, status, line)) { fail_line_(line); }
        f->status = status;
    }
    if (*failure_in_job_()) {
        f->job_failed = 1;
        pthread_cond_broadcast(&f->job_ended);
    }
    pthread_mutex_unlock(&f->lock);
    while (*failure_in_job_()) { pause(); }
    exit(f->status);
}

// For the main thread, now and then: ends the process if a job has failed. About 20 ns.
static inline void fail_check(void) {
    Failure* f = failure_();
    pthread_mutex_lock(&f->lock);
    int failed = f->job_failed;
    pthread_mutex_unlock(&f->lock);
    if (failed) { exit(f->status); }
}

__attribute__((noreturn, format(printf, 1, 2)))
static inline void fail_input(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fail_end_(2, format, args);
}

__attribute__((noreturn, format(printf, 1, 2)))
static inline void fail_run(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fail_end_(1, format, args);
}

__attribute__((format(printf, 1, 2)))
static inline void warn_line(const char* format, ...) {
    char line[FAIL_LINE_BYTES];
    va_list args;
    va_start(args, format);
    fail_format_(line, format, args);
    va_end(args);
    fail_line_(line);
}

__attribute__((format(printf, 1, 2)))
static inline void warn_alike(const char* format, ...) {
    char line[FAIL_LINE_BYTES];
    va_list args;
    if (failure_()->follows) { return; }
    va_start(args, format);
    fail_format_(line, format, args);
    va_end(args);
    fail_line_(line);
}

// malloc that cannot return NULL; `what` names the thing in the message ("activations")
static inline void* malloc_check(size_t n_bytes, const char* what) {
    void* p = malloc(n_bytes ? n_bytes : 1);
    if (!p) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return p;
}

// realloc of the same kind, for lists that grow
static inline void* realloc_check(void* old, size_t n_bytes, const char* what) {
    void* p = realloc(old, n_bytes ? n_bytes : 1);
    if (!p) { fail_run("%s: no memory for %zu bytes", what, n_bytes); }
    return p;
}

// a copy of a string on the heap
static inline char* string_copy(const char* s) {
    size_t n_bytes = strlen(s) + 1;
    return (char*)memcpy(malloc_check(n_bytes, "string"), s, n_bytes);
}

static inline int ends_with(const char* text, const char* end) {
    size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

// folder/name on the heap; path_join of outfile.h needs no free, and has a limit
static inline char* path_joined(const char* folder, const char* name) {
    const size_t n_bytes = strlen(folder) + strlen(name) + 2;
    char* path = (char*)malloc_check(n_bytes, "path");
    snprintf(path, n_bytes, "%s%s%s", folder, ends_with(folder, "/") ? "" : "/", name);
    return path;
}
#endif  // LLMC_FAIL_H
