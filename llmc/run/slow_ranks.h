/*
Ranks that are slower than the others: a card that is too hot, a machine that someone else uses, too. All ranks wait for
the slowest in every step, so their steps take equally long; what tells is the time in which a rank does not wait.
    slow_ranks_step   behind each step of training: the seconds in it that this rank did not wait; all ranks of a
                      stage call
    slow_ranks_add    a window of steps: seconds of each rank (P) for a micro-batch, 0: it has none. slow[i]: how many
                      windows in a row rank i has been slow
    slow_ranks_init, slow_ranks_free
Every SLOW_STEPS steps the ranks tell each other. One that has taken SLOW_TIMES the median or longer in SLOW_WINDOWS
windows in a row, and SLOW_SECONDS more than it in each, is named in a line; and again if it gets well and falls behind
once more. Not a bit of the run depends on it.
With --pp the ranks of each stage are compared, for they do the same work. With --ep a rank may be slow because its
experts are busy: "load" says so. Between GPUs ranks wait for each other on the device, of which the host knows nothing:
there nothing is measured.
Cost:   8 bytes to each rank in SLOW_STEPS steps.
Source: the idea and 1.15 are those of NVIDIA's resiliency extension (nvidia-resiliency-ext, straggler detection)
*/
#ifndef LLMC_SLOW_RANKS_H
#define LLMC_SLOW_RANKS_H
#include "../core/fail.h"   // malloc_check
#include "../ranks/comm.h"  // comm_all_gather

enum { SLOW_STEPS = 50, SLOW_WINDOWS = 5 };
#define SLOW_TIMES 1.15
#define SLOW_SECONDS 0.1  // in SLOW_STEPS steps: less is noise, and not worth a line

typedef struct {
    int P, n_steps;            // ranks; steps of the window that goes on
    double own;                // seconds in them that this rank has not waited
    double *seconds, *sorted;  // (P) of a window
    int* slow;                 // (P) windows in a row
} SlowRanks;

static inline SlowRanks slow_ranks_init(int P) {
    SlowRanks x = {P, 0, 0.0, NULL, NULL, NULL};
    x.seconds = (double*)malloc_check(2 * sizeof(double) * (size_t)P, "seconds of ranks");
    x.sorted = x.seconds + P;
    x.slow = (int*)memset(malloc_check(sizeof(int) * (size_t)P, "slow ranks"), 0, sizeof(int) * (size_t)P);
    return x;
}

static inline void slow_ranks_free(SlowRanks* x) { free(x->seconds), free(x->slow); }

static inline int slow_ranks_compare_(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// returns the median of those that have work, the lower one of two
static inline double slow_ranks_add(SlowRanks* x, const double* seconds) {
    int n = 0;
    for (int i = 0; i < x->P; i++) {
        if (seconds[i] > 0.0) { x->sorted[n++] = seconds[i]; }
    }
    qsort(x->sorted, (size_t)n, sizeof(double), slow_ranks_compare_);
    const double median = n > 0 ? x->sorted[(n - 1) / 2] : 0.0;
    for (int i = 0; i < x->P; i++) {
        const int is_slow = seconds[i] >= SLOW_TIMES * median && seconds[i] >= median + SLOW_SECONDS;
        x->slow[i] = is_slow ? x->slow[i] + 1 : 0;
    }
    return median;
}

// c: the ranks of a stage; n_batches: micro-batches that this one has computed; step: how many are done
static inline void slow_ranks_step(SlowRanks* x, Comm* c, double own, int n_batches, int step) {
    x->own += own;
    if (c->size == 1 || c->link->nccl || ++x->n_steps < SLOW_STEPS) { return; }
    const double mine = n_batches > 0 ? x->own / n_batches : 0.0;
    comm_wait(c, comm_all_gather(c, &mine, x->seconds, 1, DT_F64, HERE));
    const double median = slow_ranks_add(x, x->seconds);
    for (int i = 0; i < x->P && c->rank == 0; i++) {
        if (x->slow[i] != SLOW_WINDOWS) { continue; }
        warn_line("step %d: rank %d is slow, and the others wait for it: its own work has taken %.2f times as long as "
                  "theirs, for %d steps %.2f times or longer: look at its machine", step, c->members[i],
                  x->seconds[i] / median, SLOW_WINDOWS * SLOW_STEPS, SLOW_TIMES);
    }
    x->own = 0.0, x->n_steps = 0;
}
#endif  // LLMC_SLOW_RANKS_H
