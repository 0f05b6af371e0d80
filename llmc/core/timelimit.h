/*
A limit on the CPU time of work that cannot be asked to stop, such as one call of a library on somebody's input.
    time_limit_init, time_limit_free   a timer of the calling thread
    time_limit_begin   from now on so many seconds; when they are over, the line that was given here and status 2
    time_limit_end     the work is done
CPU time of this thread, not time on the clock: a busy machine, a slow disk and a process that is stopped use none.
Cost:   a microsecond a piece of work, nothing meanwhile.
Errors: a system that gives no timer sets no limit. The end comes from a signal handler (SIGVTALRM), as that of a file
        that is cut short does (mapfile.h): by _exit, for the interrupted call may hold the heap's lock.
*/
#ifndef LLMC_TIMELIMIT_H
#define LLMC_TIMELIMIT_H
#include "fail.h"
#include <signal.h>
#include <time.h>

typedef struct {
    timer_t timer;
    int has_timer;
    char line[512];
} TimeLimit;

static inline void time_limit_over_(int signal_number, siginfo_t* info, void* context) {
    const TimeLimit* limit = (const TimeLimit*)info->si_value.sival_ptr;
    (void)signal_number;
    (void)context;
    ssize_t written = write(2, limit->line, strlen(limit->line));
    (void)written;
    _exit(2);
}

// on the heap: the timer remembers the address
static inline TimeLimit* time_limit_init(void) {
    struct sigaction action;
    struct sigevent event;
    TimeLimit* limit = (TimeLimit*)malloc_check(sizeof *limit, "time limit");
    memset(&action, 0, sizeof action);
    action.sa_sigaction = time_limit_over_;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGVTALRM, &action, NULL);
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGVTALRM;
    event.sigev_value.sival_ptr = limit;
    limit->has_timer = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &limit->timer) == 0;
    return limit;
}

static inline void time_limit_set_(const TimeLimit* limit, double seconds) {
    struct itimerspec when;
    memset(&when, 0, sizeof when);
    when.it_value.tv_sec = (time_t)seconds;
    when.it_value.tv_nsec = (long)(1e9 * (seconds - (double)when.it_value.tv_sec));
    if (limit->has_timer) { timer_settime(limit->timer, 0, &when, NULL); }
}

__attribute__((format(printf, 3, 4)))
static inline void time_limit_begin(TimeLimit* limit, double seconds, const char* format, ...) {
    va_list args;
    const int n = snprintf(limit->line, sizeof limit->line, "%.100s: ", program_invocation_short_name);
    va_start(args, format);
    vsnprintf(limit->line + n, sizeof limit->line - 1 - (size_t)n, format, args);
    va_end(args);
    plain_text(limit->line);
    strcat(limit->line, "\n");
    time_limit_set_(limit, seconds);
}

static inline void time_limit_end(const TimeLimit* limit) { time_limit_set_(limit, 0.0); }

static inline void time_limit_free(TimeLimit* limit) {
    if (limit && limit->has_timer) { timer_delete(limit->timer); }
    free(limit);
}
#endif  // LLMC_TIMELIMIT_H
