/*
Learning rate of step s = 0..N-1, with w steps of warm-up, a peak and a final share f (final rate = peak * f):
    s < w     peak * (s+1) / w                                            all schedules
    constant  peak
    linear    peak - r * (peak - peak*f)                                  r = (s-w) / (N-w), from 0 towards 1
    cosine    peak*f + 0.5 * (1 + cos(pi*r)) * (peak - peak*f)
    wsd       peak until d = floor(0.8*N), then peak*f + (1 - sqrt((s-d) / (N-d))) * (peak - peak*f)
Exact: every line is computed in double as written and rounded to float once; the cosine is that of the float angle,
correctly rounded (fmath.h). A pure function of its arguments, so a resumed run needs no state.
Requires 0 <= s, 0 <= w < N and 0 <= f <= 1; the trainer checks what the user typed before it calls.
Source: cosine decay, Loshchilov & Hutter 2017 (arXiv:1608.03983); wsd (warm-up, stable, decay) with the 1 - sqrt
cooldown, Haegele et al. 2024 (arXiv:2405.18392).
*/
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H
#include "../core/fmath.h"  // fm_cos
#include <assert.h>
#include <math.h>

#define SCHEDULE_NAMES "constant|linear|cosine|wsd"  // a list of choice.h, which --schedule takes
typedef enum { SCHEDULE_CONSTANT, SCHEDULE_LINEAR, SCHEDULE_COSINE, SCHEDULE_WSD } Schedule;

static inline float schedule_lr(Schedule schedule, int step, int n_steps, int warmup, double peak,
                                double final_fraction) {
    assert(0 <= step && 0 <= warmup && warmup < n_steps);
    if (step < warmup) { return (float)(peak * (step + 1) / warmup); }
    double r = (double)(step - warmup) / (n_steps - warmup);
    double last = peak * final_fraction;
    double decay_start = floor(0.8 * n_steps);
    double lr = peak;
    if (schedule == SCHEDULE_LINEAR) {
        lr = peak - r * (peak - last);
    } else if (schedule == SCHEDULE_COSINE) {
        const double pi = 3.14159265358979323846;
        lr = last + 0.5 * (1.0 + (double)fm_cos((float)(pi * r))) * (peak - last);
    } else if (schedule == SCHEDULE_WSD && step >= decay_start) {
        lr = last + (1.0 - sqrt((step - decay_start) / (n_steps - decay_start))) * (peak - last);
    }
    return (float)lr;
}
#endif  // LLMC_SCHEDULE_H
