/*
SIGTERM, SIGINT, SIGUSR1 (Slurm's warning), SIGXCPU (a limit on CPU time), SIGHUP (a terminal that is gone) and SIGPIPE
(a reader of standard output that is gone) end a run after the step, with a checkpoint.
*/
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H
#include <signal.h>

// the signal: the step is finished, a checkpoint saved
static inline volatile sig_atomic_t* stop_flag(void) {
    static volatile sig_atomic_t requested;  // state of the process, as its signal handlers are
    return &requested;
}

// Somebody asks for the end: who asks a second time, by any of the three, ends the process at once
static inline void stop_asked_(int signal_number) {
    if (*stop_flag() == 0) { *stop_flag() = signal_number; }
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGUSR1, SIG_DFL);
}

// A terminal, a reader or a limit, about which nobody has asked anything: whoever ends the run because of it, as launch
// does when its own reader is gone, asks for the first time. SIGHUP and SIGPIPE stay known (main_flush_)
static inline void stop_noticed_(int signal_number) {
    if (signal_number != SIGXCPU || *stop_flag() == 0) { *stop_flag() = signal_number; }
    signal(SIGHUP, SIG_IGN);   // of a terminal that is gone come several
    signal(SIGXCPU, SIG_IGN);  // comes every second
}

// unless whoever started us wished it ignored, as nohup does
static inline void stop_on_(int signal_number) {
    if (signal(signal_number, stop_noticed_) == SIG_IGN) { signal(signal_number, SIG_IGN); }
}

static inline void stop_on_signals(void) {
    signal(SIGTERM, stop_asked_);
    signal(SIGINT, stop_asked_);
    signal(SIGUSR1, stop_asked_);  // Slurm's warning before the time is up
    stop_on_(SIGXCPU);
    stop_on_(SIGHUP);
    stop_on_(SIGPIPE);
}
#endif  // LLMC_SIGNALS_H
