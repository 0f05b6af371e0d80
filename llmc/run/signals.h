/*
SIGTERM, SIGINT, SIGUSR1 (Slurm's warning) and SIGHUP (a terminal that is gone) end a run after the step, and with a
checkpoint.
*/
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H
#include <signal.h>

// the signal, of SIGTERM, SIGINT, SIGUSR1 and SIGHUP: the step is finished, a checkpoint saved; a second one, SIGHUP
// excepted, ends the process at once
static inline volatile sig_atomic_t* stop_flag(void) {
    static volatile sig_atomic_t requested;  // state of the process, as its signal handlers are
    return &requested;
}

static inline void stop_handler_(int signal_number) {
    *stop_flag() = signal_number;
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
    signal(SIGHUP, SIG_IGN);  // of a terminal that is gone come several
}

static inline void stop_on_signals(void) {
    signal(SIGTERM, stop_handler_);
    signal(SIGINT, stop_handler_);
    signal(SIGUSR1, stop_handler_);  // Slurm's warning before the time is up
    if (signal(SIGHUP, stop_handler_) == SIG_IGN) { signal(SIGHUP, SIG_IGN); }  // nohup's wish
}
#endif  // LLMC_SIGNALS_H
