/*
One job on a thread of its own, at most one at a time: a checkpoint is written while training goes on.
    background_start(b, work, arg)   waits for the job before, then runs work(arg)
    background_wait(b)               returns when there is no job any more
The job must own what it reads: the starter hands it a copy. Signals are left to the main thread.
A job that fails says why, as fail_run does everywhere, and stands still; the main thread ends the process in
background_wait or before that in fail_check (fail.h), which it should ask now and then. A process that ends by exit()
first lets the job come to its end. So wait for the last job before main returns: its failure has to become the exit
status.
*/
#ifndef LLMC_BACKGROUND_H
#define LLMC_BACKGROUND_H
#include "fail.h"
#include <pthread.h>
#include <signal.h>

typedef struct {
    pthread_t thread;
    int running;              // started, and not waited for
    int over;                 // work has returned; under the lock of fail.h
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
    Failure* f = failure_();
    *failure_in_job_() = 1;
    b->work(b->arg);
    pthread_mutex_lock(&f->lock);
    b->over = 1;
    pthread_cond_broadcast(&f->job_ended);
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

// returns when the job is done or has failed
static inline void background_ended_(const Background* b) {
    Failure* f = failure_();
    pthread_mutex_lock(&f->lock);
    while (!b->over && !f->job_failed) { pthread_cond_wait(&f->job_ended, &f->lock); }
    pthread_mutex_unlock(&f->lock);
}

static inline void background_wait(Background* b) {
    if (!b->running) { return; }
    background_ended_(b);
    fail_check();
    int error = pthread_join(b->thread, NULL);
    b->running = 0;
    *background_active_() = NULL;
    if (error) { fail_run("background thread: %s", strerror(error)); }
}

// at exit, which only the main thread calls
static inline void background_finish_(void) {
    Background* b = *background_active_();
    if (!b || !b->running) { return; }
    background_ended_(b);
    if (b->over) { background_wait(b); }  // else it has failed and stands still: the process may end
}

static inline void background_start(Background* b, void (*work)(void* arg), void* arg) {
    static int registered;
    sigset_t all, before;
    background_wait(b);
    if (!registered) { registered = atexit(background_finish_) == 0; }
    b->work = work;
    b->arg = arg;
    b->running = 1;
    b->over = 0;
    *background_active_() = b;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits the mask
    int error = pthread_create(&b->thread, NULL, background_main_, b);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        b->running = 0;
        fail_run("background thread: %s", strerror(error));
    }
}
#endif  // LLMC_BACKGROUND_H
