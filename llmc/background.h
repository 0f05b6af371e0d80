/*
One job on a thread of its own, at most one at a time: a checkpoint is written while training goes on.
    background_start(b, work, arg)   waits for the job before, then runs work(arg)
    background_wait(b)               returns when there is no job any more
The job must own what it reads: the starter hands it a copy. A job that fails ends the process as it would at home (fail_run);
a process that ends by exit() first lets the job finish. Signals are left to the main thread.
*/
#ifndef LLMC_BACKGROUND_H
#define LLMC_BACKGROUND_H
#include "fail.h"
#include <pthread.h>
#include <signal.h>

typedef struct {
    pthread_t thread;
    int running;
    void (*work)(void* arg);
    void* arg;
} Background;

// the one that is at work; a state of the process, for exit() waits for it
static inline Background** background_active_(void) {
    static Background* active;
    return &active;
}

static inline void* background_main_(void* background) {
    Background* b = (Background*)background;
    b->work(b->arg);
    return NULL;
}

static inline void background_wait(Background* b) {
    if (!b->running) { return; }
    int error = pthread_join(b->thread, NULL);
    b->running = 0;
    *background_active_() = NULL;
    if (error) { fail_run("background thread: %s", strerror(error)); }
}

// at exit; a job that calls exit() itself does not wait for itself
static inline void background_finish_(void) {
    Background* b = *background_active_();
    if (b && b->running && !pthread_equal(b->thread, pthread_self())) { background_wait(b); }
}

static inline void background_start(Background* b, void (*work)(void* arg), void* arg) {
    static int registered;
    sigset_t all, before;
    background_wait(b);
    if (!registered) { registered = atexit(background_finish_) == 0; }
    b->work = work;
    b->arg = arg;
    b->running = 1;
    *background_active_() = b;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // which the new thread inherits
    int error = pthread_create(&b->thread, NULL, background_main_, b);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        b->running = 0;
        fail_run("background thread: %s", strerror(error));
    }
}
#endif  // LLMC_BACKGROUND_H
