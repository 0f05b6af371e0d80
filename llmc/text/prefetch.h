/*
Batches in the order in which training asks for them, made ahead by threads or when they are asked for.
    prefetch_start(p, rows, B, n_workers, n_ahead, n_kept, first_row, context)
    prefetch_batch(p, k, &inputs, &targets)   micro-batch number k: the rows first_row(context, k) .. + B-1, as (B, T)
                                              each; they stay until the n_kept-th call after this one
    prefetch_stop(p)
Workers fill a ring of slots. One takes the next free number, fills its slot and goes on, never more than n_ahead - 1
beyond the batch that was asked for last. What is in a batch depends on k alone: not on the number of workers, on who is
faster, nor on what was asked for before. Asking for k+1 after k, or for k again, is what the ring is for; any other
number (a step that is computed twice, a run that goes back) empties it and begins there. With 0 workers prefetch_batch
makes the batch itself, and has the pages of the next one read from disk meanwhile.
n_kept: 1 where a batch has been used when the next is asked for; a GPU that fetches it by itself may lag behind by all
batches of an update. The slots are memory of device_pinned.
first_row is called ahead of the run, also beyond its last step, and by the workers: it is a pure function of k, whose
context does not change.
Errors: a worker that fails (a shard that changes while in use) says why and stands still, as background.h's jobs do;
        the main thread ends the process in prefetch_batch or in fail_check. A process that ends does not wait for the
        workers.
Memory: prefetch_bytes: slots * 2 * B * T * 4 bytes, slots = n_ahead + n_kept - 1; n_kept with 0 workers.
*/
#ifndef LLMC_PREFETCH_H
#define LLMC_PREFETCH_H
#include "../core/device.h"  // device_pinned
#include "dataloader.h"      // DataLoader, dataloader_batch, dataloader_ask_pages_
#include <pthread.h>
#include <signal.h>

typedef int64_t (*PrefetchRow)(void* context, int64_t k);

// Counters and slots are under the lock of fail.h, so that the main thread waits for a batch and for a failure at once.
typedef struct {
    const DataLoader* rows;
    int B;
    PrefetchRow first_row;
    void* context;
    int n_workers, n_slots, n_kept;
    int *inputs, *targets;    // (n_slots, B, T)
    int64_t* in_slot;         // number of the batch that lies complete in each slot, -1: none
    int64_t first_slot;       // batch k lies in slot (first_slot + k) % n_slots; it moves when the ring begins anew
    int64_t asked;            // the batch that was asked for last, -1 before the first
    int64_t next;             // the batch that the next free worker makes
    int n_busy;               // workers that are filling a slot
    int paused, stopping;
    pthread_cond_t room;      // something to do for a worker
    pthread_t* threads;
} Prefetch;

static inline int prefetch_slot_(const Prefetch* p, int64_t k) { return (int)((p->first_slot + k) % p->n_slots); }

// makes batch k in a slot that nobody reads; the lock is held before and after, not meanwhile
static inline void prefetch_make_(Prefetch* p, int64_t k) {
    Failure* f = failure_();
    const int slot = prefetch_slot_(p, k);
    const size_t first = (size_t)slot * (size_t)p->B * (size_t)p->rows->T;
    p->in_slot[slot] = -1;
    pthread_mutex_unlock(&f->lock);
    dataloader_batch(p->rows, p->first_row(p->context, k), p->B, p->inputs + first, p->targets + first);
    pthread_mutex_lock(&f->lock);
    p->in_slot[slot] = k;
}

static inline void* prefetch_worker_(void* prefetch) {
    Prefetch* p = (Prefetch*)prefetch;
    Failure* f = failure_();
    *failure_in_job_() = 1;
    pthread_mutex_lock(&f->lock);
    while (!p->stopping) {
        if (p->paused || p->asked < 0 || p->next > p->asked + p->n_slots - p->n_kept) {
            pthread_cond_wait(&p->room, &f->lock);
            continue;
        }
        p->n_busy++;
        prefetch_make_(p, p->next++);
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
    pthread_sigmask(SIG_SETMASK, &others, &before);  // the new threads inherit the mask
    for (int i = 0; i < p->n_workers; i++) {
        int error = pthread_create(&p->threads[i], NULL, prefetch_worker_, p);
        if (error) { fail_run("--prefetch-workers: thread %d of %d: %s", i + 1, p->n_workers, strerror(error)); }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static inline int prefetch_slots_(int n_workers, int n_ahead, int n_kept) {
    return (n_workers > 0 ? n_ahead : 1) + n_kept - 1;
}

static inline double prefetch_bytes(int n_workers, int n_ahead, int n_kept, int B, int T) {
    return 8.0 * prefetch_slots_(n_workers, n_ahead, n_kept) * B * T;
}

static inline void prefetch_start(Prefetch* p, const DataLoader* rows, int B, int n_workers, int n_ahead, int n_kept,
                                  PrefetchRow first_row, void* context) {
    assert(B > 0 && n_workers >= 0 && n_ahead > 0 && n_kept > 0);
    memset(p, 0, sizeof *p);
    p->rows = rows;
    p->B = B;
    p->first_row = first_row;
    p->context = context;
    p->n_workers = n_workers;
    p->n_kept = n_kept;
    p->n_slots = prefetch_slots_(n_workers, n_ahead, n_kept);
    p->asked = -1;
    const size_t n_bytes = sizeof(int) * (size_t)p->n_slots * (size_t)B * (size_t)rows->T;
    p->inputs = (int*)device_pinned(n_bytes, "batches of --prefetch-buffer");
    p->targets = (int*)device_pinned(n_bytes, "batches of --prefetch-buffer");
    p->in_slot = (int64_t*)malloc_check((size_t)p->n_slots * sizeof(int64_t), "batches of --prefetch-buffer");
    p->threads = (pthread_t*)malloc_check((size_t)n_workers * sizeof(pthread_t), "threads of --prefetch-workers");
    for (int i = 0; i < p->n_slots; i++) { p->in_slot[i] = -1; }
    pthread_cond_init(&p->room, NULL);
    prefetch_threads_(p);
}

// returns when no worker writes to a slot, or one has failed; the lock is held
static inline void prefetch_pause_(Prefetch* p) {
    Failure* f = failure_();
    p->paused = 1;
    while (p->n_busy > 0 && !f->job_failed) { pthread_cond_wait(&f->job_ended, &f->lock); }
}

// Batch k and those after it are wanted; the lock is held. A ring that begins anew does so behind the slot of the batch
// that was asked for last, so that this one and those before it stay.
static inline void prefetch_ask_(Prefetch* p, int64_t k) {
    if (p->asked < 0 || (k != p->asked && k != p->asked + 1)) {
        prefetch_pause_(p);
        const int64_t slot = p->asked < 0 ? 0 : prefetch_slot_(p, p->asked) + 1;
        for (int i = 0; i < p->n_slots; i++) { p->in_slot[i] = -1; }
        p->first_slot = slot + p->n_slots - k % p->n_slots;
        p->next = k;
        p->paused = 0;
    }
    p->asked = k;
    pthread_cond_broadcast(&p->room);
}

static inline void prefetch_batch(Prefetch* p, int64_t k, const int** inputs, const int** targets) {
    Failure* f = failure_();
    assert(k >= 0);
    pthread_mutex_lock(&f->lock);
    prefetch_ask_(p, k);
    const int slot = prefetch_slot_(p, k);
    if (p->n_workers == 0 && p->in_slot[slot] != k) { prefetch_make_(p, k); }
    while (p->in_slot[slot] != k && !f->job_failed) { pthread_cond_wait(&f->job_ended, &f->lock); }
    pthread_mutex_unlock(&f->lock);
    fail_check();
    if (p->n_workers == 0) { dataloader_ask_pages_(p->rows, p->first_row(p->context, k + 1), p->B); }
    *inputs = p->inputs + (size_t)slot * (size_t)p->B * (size_t)p->rows->T;
    *targets = p->targets + (size_t)slot * (size_t)p->B * (size_t)p->rows->T;
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
    device_pinned_free(p->inputs);
    device_pinned_free(p->targets);
    free(p->in_slot);
    free(p->threads);
    memset(p, 0, sizeof *p);
}
#endif  // LLMC_PREFETCH_H
