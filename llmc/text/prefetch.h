/*
Batches made ahead by threads, in the order in which training asks for them.
    prefetch_start(p, rows, B, n_workers, n_slots, first_row, context)
    prefetch_batch(p, k, &inputs, &targets)   micro-batch number k: the rows first_row(context, k) .. + B-1, as (B, T) each;
                                              they stay until the next call
    prefetch_stop(p)
Micro-batch k lies in slot k % n_slots of a ring. A worker takes the next free number, fills its slot and goes on, never more
than n_slots - 1 ahead of the one that was asked for last, so no batch is written over while it is in use. What is in a batch
depends on k alone: not on the number of workers, on who is faster, nor on what was asked for before. Asking for k+1 after k is
what the ring is for; any other number (the same step again, a run that goes back) empties it and begins there.
With 0 workers prefetch_batch makes the batch itself, and there is one slot.
first_row runs on the workers, ahead of the run and beyond its last step: a pure function of k, whose context does not change.
Errors: a worker that fails (a shard that changes while in use) says why and stands still, as background.h's jobs do; the main
        thread ends the process in prefetch_batch or in fail_check. A process that ends does not wait for the workers.
Memory: n_slots * 2 * B * T * 4 bytes.
*/
#ifndef LLMC_PREFETCH_H
#define LLMC_PREFETCH_H
#include "dataloader.h"  // DataLoader, dataloader_batch
#include <pthread.h>
#include <signal.h>

typedef int64_t (*PrefetchRow)(void* context, int64_t k);

// Counters and slots are under the lock of fail.h, so that the main thread waits for a batch and for a failure at once.
typedef struct {
    const DataLoader* rows;
    int B;
    PrefetchRow first_row;
    void* context;
    int n_workers, n_slots;
    int *inputs, *targets;    // (n_slots, B, T)
    int64_t* in_slot;         // number of the batch that lies complete in each slot, -1: none
    int64_t asked;            // the batch in use, -1 before the first
    int64_t next;             // the batch that the next free worker makes
    int n_busy;               // workers that are filling a slot
    int paused, stopping;
    pthread_cond_t room;      // something to do for a worker
    pthread_t* threads;
} Prefetch;

static inline size_t prefetch_slot_(const Prefetch* p, int64_t k) {
    return (size_t)(k % p->n_slots) * (size_t)p->B * (size_t)p->rows->T;
}

static inline void prefetch_make_(const Prefetch* p, int64_t k) {
    size_t slot = prefetch_slot_(p, k);
    dataloader_batch(p->rows, p->first_row(p->context, k), p->B, p->inputs + slot, p->targets + slot);
}

static inline void* prefetch_worker_(void* prefetch) {
    Prefetch* p = (Prefetch*)prefetch;
    Failure* f = failure_();
    *failure_in_job_() = 1;
    pthread_mutex_lock(&f->lock);
    while (!p->stopping) {
        if (p->paused || p->asked < 0 || p->next >= p->asked + p->n_slots) {
            pthread_cond_wait(&p->room, &f->lock);
            continue;
        }
        const int64_t k = p->next++;
        p->in_slot[k % p->n_slots] = -1;
        p->n_busy++;
        pthread_mutex_unlock(&f->lock);
        prefetch_make_(p, k);
        pthread_mutex_lock(&f->lock);
        p->in_slot[k % p->n_slots] = k;
        p->n_busy--;
        pthread_cond_broadcast(&f->job_ended);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

// signals are left to the main thread, but for a file that is cut short while it is read (mapfile.h)
static inline void prefetch_threads_(Prefetch* p) {
    sigset_t others, before;
    sigfillset(&others);
    sigdelset(&others, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &others, &before);  // which the new threads inherit
    for (int i = 0; i < p->n_workers; i++) {
        int error = pthread_create(&p->threads[i], NULL, prefetch_worker_, p);
        if (error) { fail_run("--prefetch-workers: thread %d of %d: %s", i + 1, p->n_workers, strerror(error)); }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static inline double prefetch_bytes(int n_workers, int n_slots, int B, int T) {
    return 8.0 * (n_workers > 0 ? n_slots : 1) * B * T;
}

static inline void prefetch_start(Prefetch* p, const DataLoader* rows, int B, int n_workers, int n_slots, PrefetchRow first_row,
                                  void* context) {
    assert(B > 0 && n_workers >= 0 && n_slots > 0);
    memset(p, 0, sizeof *p);
    p->rows = rows;
    p->B = B;
    p->first_row = first_row;
    p->context = context;
    p->n_workers = n_workers;
    p->n_slots = n_workers > 0 ? n_slots : 1;
    p->asked = -1;
    const size_t n = (size_t)p->n_slots * (size_t)B * (size_t)rows->T;
    p->inputs = (int*)malloc_check(n * sizeof(int), "batches of --prefetch-buffer");
    p->targets = (int*)malloc_check(n * sizeof(int), "batches of --prefetch-buffer");
    p->in_slot = (int64_t*)malloc_check((size_t)p->n_slots * sizeof(int64_t), "batches of --prefetch-buffer");
    p->threads = (pthread_t*)malloc_check((size_t)n_workers * sizeof(pthread_t), "threads of --prefetch-workers");
    for (int i = 0; i < p->n_slots; i++) { p->in_slot[i] = -1; }
    pthread_cond_init(&p->room, NULL);
    prefetch_threads_(p);
}

// until no worker writes to a slot, or one has failed; the lock is held
static inline void prefetch_pause_(Prefetch* p) {
    Failure* f = failure_();
    p->paused = 1;
    while (p->n_busy > 0 && !f->job_failed) { pthread_cond_wait(&f->job_ended, &f->lock); }
}

// asks the workers for batch k and those after it; the lock is held
static inline void prefetch_ask_(Prefetch* p, int64_t k) {
    if (p->asked < 0 || (k != p->asked && k != p->asked + 1)) {
        prefetch_pause_(p);
        for (int i = 0; i < p->n_slots; i++) { p->in_slot[i] = -1; }
        p->next = k;
        p->paused = 0;
    }
    p->asked = k;
    pthread_cond_broadcast(&p->room);
}

static inline void prefetch_batch(Prefetch* p, int64_t k, const int** inputs, const int** targets) {
    Failure* f = failure_();
    const size_t slot = prefetch_slot_(p, k);
    assert(k >= 0);
    if (p->n_workers == 0) {
        prefetch_make_(p, k);
    } else {
        pthread_mutex_lock(&f->lock);
        prefetch_ask_(p, k);
        while (p->in_slot[k % p->n_slots] != k && !f->job_failed) { pthread_cond_wait(&f->job_ended, &f->lock); }
        pthread_mutex_unlock(&f->lock);
        fail_check();
    }
    *inputs = p->inputs + slot;
    *targets = p->targets + slot;
}

// also of one that was never started, if it is all zero
static inline void prefetch_stop(Prefetch* p) {
    Failure* f = failure_();
    pthread_mutex_lock(&f->lock);
    p->stopping = 1;
    prefetch_pause_(p);
    pthread_mutex_unlock(&f->lock);
    fail_check();
    if (p->n_workers > 0) { pthread_cond_broadcast(&p->room); }
    for (int i = 0; i < p->n_workers; i++) { pthread_join(p->threads[i], NULL); }
    if (p->rows) { pthread_cond_destroy(&p->room); }
    free(p->inputs);
    free(p->targets);
    free(p->in_slot);
    free(p->threads);
    memset(p, 0, sizeof *p);
}
#endif  // LLMC_PREFETCH_H
