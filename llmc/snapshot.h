/*
Saving without stopping: the state of a run as it was after one step, written while the next steps are computed.
    snapshot_take    copies the arenas (or points at them, when nothing goes on meanwhile) and the run's state
    background_start runs the writer on a thread of its own (background.h); one at a time
Training waits for the copy, and for the writer before if that is still at work; the rest of a save costs it nothing but the
memory of the copy: parameters and both moments once more.
    snapshot_print   at the end of a run: how many were saved, how fast, how long training waited
*/
#ifndef LLMC_SNAPSHOT_H
#define LLMC_SNAPSHOT_H
#include "background.h"  // Background
#include "device.h"      // arena_alloc
#include "log.h"         // seconds_now, format_bytes
#include "run.h"         // RunState

enum { SNAPSHOT_ARENAS = 3 };  // parameters, first and second moments

typedef struct {
    const float* arena[SNAPSHOT_ARENAS];
    float* copy[SNAPSHOT_ARENAS];
    size_t n;                // elements of each
    RunState state;
    int n_saved;
    double n_bytes;          // of one checkpoint
    double seconds_writing;  // in all
    double seconds_waited;   // of them, and for copies, training stood still
} Snapshot;

static inline void snapshot_take(Snapshot* s, const float* params, const float* m, const float* v, size_t n, const RunState* state,
                                 int copy) {
    const float* live[SNAPSHOT_ARENAS] = {params, m, v};
    s->n = n;
    s->state = *state;
    for (int a = 0; a < SNAPSHOT_ARENAS; a++) {
        s->arena[a] = live[a];
        if (!copy) { continue; }
        if (!s->copy[a]) { s->copy[a] = (float*)arena_alloc(sizeof(float) * n, "copy of the state"); }
        #pragma omp parallel for schedule(static)
        for (size_t i = 0; i < n; i++) { s->copy[a][i] = live[a][i]; }
        s->arena[a] = s->copy[a];
    }
}

static inline void snapshot_print(const Snapshot* s) {
    if (s->n_saved == 0) { return; }
    double each = s->seconds_writing / s->n_saved;
    printf("checkpoints: %d saved, %s each in %.2f s (%s/s); training waited %.2f s for each\n", s->n_saved, format_bytes(s->n_bytes).s,
           each, format_bytes(s->n_bytes / each).s, s->seconds_waited / s->n_saved);
}

static inline void snapshot_free(Snapshot* s) {
    for (int a = 0; a < SNAPSHOT_ARENAS; a++) { arena_free(s->copy[a], sizeof(float) * s->n); }
}
#endif  // LLMC_SNAPSHOT_H
