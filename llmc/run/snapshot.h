/*
Saving without stopping: the state of a run as it was after one step, written while the next steps are computed.
    snapshot_save    copies arenas and state and has them written on a thread of its own (background.h); or, when
                     nothing goes on meanwhile, points at them and writes at once. Arenas of a GPU are copied to the
                     host in any case
    snapshot_newest  the step of the newest checkpoint that is whole; asked at every step, it ends a run whose writer
                     has failed
    snapshot_is_old  is it time for one that nobody asked for?
    snapshot_print   at the end of a run: how many were saved, how fast, how long training waited
Training waits for the copy, and for the writer before if that is still at work; the rest of a save costs it nothing but
the memory of the copy, on the host: parameters, both moments and, with --ema, the average once more.
*/
#ifndef LLMC_SNAPSHOT_H
#define LLMC_SNAPSHOT_H
#include "../core/background.h"  // Background
#include "../core/device.h"      // arena_alloc, device_download
#include "../core/print.h"       // seconds_now
#include "../files/checkpoint.h" // checkpoint_abandon_at_exit
#include "state.h"              // RunState

// parameters, first and second moments and the average of the parameters (0 bytes: none is kept), on the device; and
// what else a trainer may have, in host memory
enum { SNAPSHOT_ARENAS = 4, SNAPSHOT_ARENAS_MAX = SNAPSHOT_ARENAS + 16 };

typedef struct {
    int n_arenas;
    const void* arena[SNAPSHOT_ARENAS_MAX];  // in host memory: what is to be written
    void* copy[SNAPSHOT_ARENAS_MAX];
    size_t n_bytes[SNAPSHOT_ARENAS_MAX];
    RunState state;
    void (*write)(void* run);  // writes a checkpoint from arena and state
    void* run;
    Background writer;
    int n_begun;               // asked for
    int n_saved;               // of them written by the writer, read by anybody: atomic
    int saved_step;            // of the last one, likewise
    int64_t saved_at, took;    // when it was whole, and how long it took to write: milliseconds, likewise
    double seconds_writing, seconds_fastest;  // in all; of the fastest
    int n_waits;
    // training stood still so long, in n_waits saves; the last, when training is over, is none of them
    double seconds_waited;
} Snapshot;

#ifdef __CUDACC__
static inline const void* snapshot_copy_(void** copy, const void* arena, size_t n_bytes, int on_host,
                                         const Device* dev) {
    if (!*copy) { *copy = device_pinned(n_bytes, "copy of the state"); }
    if (on_host) { memcpy(*copy, arena, n_bytes); } else { device_download(*copy, arena, n_bytes, dev); }
    return *copy;
}
#else
static inline const void* snapshot_copy_(void** copy, const void* arena, size_t n_bytes, int on_host,
                                         const Device* dev) {
    (void)on_host, (void)dev;
    if (!*copy) { *copy = arena_alloc(n_bytes, "copy of the state"); }
    float* to = (float*)*copy;
    const float* from = (const float*)arena;
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n_bytes / sizeof(float); i++) { to[i] = from[i]; }
    return *copy;
}
#endif

static inline void snapshot_take_(Snapshot* s, const void* const* arenas, const size_t* n_bytes, int n_arenas,
                                  const RunState* state, int copy, const Device* dev) {
    assert(n_arenas <= SNAPSHOT_ARENAS_MAX);
    s->state = *state;
    s->n_arenas = n_arenas;
#ifdef __CUDACC__
    copy = 1;  // the writer reads host memory
#endif
    for (int a = 0; a < n_arenas; a++) {
        s->n_bytes[a] = n_bytes[a];
        const int on_host = a >= SNAPSHOT_ARENAS;
        const int copies = copy && n_bytes[a] > 0;
        s->arena[a] = copies ? snapshot_copy_(&s->copy[a], arenas[a], n_bytes[a], on_host, dev) : arenas[a];
    }
}

static inline void snapshot_write_(void* snapshot) {
    Snapshot* s = (Snapshot*)snapshot;
    double start = seconds_now(CLOCK_MONOTONIC);
    s->write(s->run);
    double seconds = seconds_now(CLOCK_MONOTONIC) - start;
    s->seconds_writing += seconds;
    s->seconds_fastest = s->n_saved == 0 || seconds < s->seconds_fastest ? seconds : s->seconds_fastest;
    __atomic_store_n(&s->took, (int64_t)(1000.0 * seconds), __ATOMIC_RELAXED);
    __atomic_store_n(&s->saved_at, (int64_t)(1000.0 * seconds_now(CLOCK_MONOTONIC)), __ATOMIC_RELAXED);
    __atomic_store_n(&s->saved_step, s->state.step, __ATOMIC_RELAXED);
    __atomic_fetch_add(&s->n_saved, 1, __ATOMIC_RELEASE);
}

// step of the newest checkpoint that is whole: one of ours, or `before`. If the writer has failed, this is the end.
static inline int snapshot_newest(const Snapshot* s, int before) {
    fail_check();
    return __atomic_load_n(&s->n_saved, __ATOMIC_ACQUIRE) > 0 ? __atomic_load_n(&s->saved_step, __ATOMIC_RELAXED)
                                                              : before;
}

// is the last one, or the time when the run began, so long ago, and 20 times as long as writing it took? Not while one
// is being written
static inline int snapshot_is_old(const Snapshot* s, double began, double seconds) {
    if (s->n_begun > __atomic_load_n(&s->n_saved, __ATOMIC_ACQUIRE)) { return 0; }
    const double last = fmax(began, 1e-3 * (double)__atomic_load_n(&s->saved_at, __ATOMIC_RELAXED));
    const double took = 1e-3 * (double)__atomic_load_n(&s->took, __ATOMIC_RELAXED);
    return seconds_now(CLOCK_MONOTONIC) - last >= fmax(seconds, 20.0 * took);
}

// One at a time: the writer before comes to its end first. arenas: whole floats or words of 4 bytes, of the same sizes
// each time; what the writer needs and training changes must be among them. beside: in the background,
// unless this is the last
static inline void snapshot_save(Snapshot* s, const void* const* arenas, const size_t* n_bytes, int n_arenas,
                                 const RunState* state, int beside, int last, void (*write)(void* run), void* run,
                                 const Device* dev) {
    const int in_background = beside && !last;
    double start = seconds_now(CLOCK_MONOTONIC);
    background_wait(&s->writer);
    snapshot_take_(s, arenas, n_bytes, n_arenas, state, in_background, dev);
    s->write = write;
    s->run = run;
    checkpoint_abandon_at_exit();
    s->n_begun++;
    if (in_background) { background_start(&s->writer, snapshot_write_, s); } else { snapshot_write_(s); }
    if (last) { return; }
    s->seconds_waited += seconds_now(CLOCK_MONOTONIC) - start;
    s->n_waits++;
}

// n_bytes: of one checkpoint
static inline void snapshot_print(const Snapshot* s, double n_bytes) {
    if (s->n_saved == 0) { return; }
    printf("checkpoints: %d of %s, each %.2f s, at best %.2f s", s->n_saved, format_bytes(n_bytes).s,
           s->seconds_writing / s->n_saved, s->seconds_fastest);
    if (s->n_waits > 0) { printf("; training waited %.2f s", s->seconds_waited / s->n_waits); }
    printf("\n");
}

static inline void snapshot_free(Snapshot* s) {
    for (int a = 0; a < s->n_arenas; a++) {
#ifdef __CUDACC__
        device_pinned_free(s->copy[a]);
#else
        arena_free(s->copy[a], s->n_bytes[a]);
#endif
    }
}
#endif  // LLMC_SNAPSHOT_H
