/*
What W ranks would take of the run that this process was asked for, by the planner's own numbers: the same program, with
the same words and some more behind them, which win, as a process of its own under --plan W.
    trial_plan   bytes of the rank that takes most; INFINITY: such ranks are refused, or no answer by the deadline
Cost: that of --plan W, which opens the data again.
*/
#ifndef LLMC_TRIAL_PLAN_H
#define LLMC_TRIAL_PLAN_H
#include "../core/fail.h"   // malloc_check
#include "../core/print.h"  // seconds_now
#include <fcntl.h>
#include <signal.h>
#include <math.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TRIAL_WORDS = 4096, TRIAL_BYTES = 1 << 18 };

// is it one of those that a plan on no card, by no launcher, has not? has_batches: it has --grad-accum of its own.
// *values: so many words behind it belong to it
static inline int trial_leaves_out_(const char* word, int has_batches, int* values) {
    static const char* const names[] = {"--plan-card", "--plan-rate", "--rank", "--batch-tokens"};
    for (int i = 0; i < 3 + has_batches; i++) {
        const size_t n = strlen(names[i]);
        if (strncmp(word, names[i], n) != 0 || (word[n] != '\0' && word[n] != '=')) { continue; }
        *values = word[n] == '\0';
        return 1;
    }
    return 0;
}

// the words of this process but for those, then `more`, which stand in `text`, one space between two
static inline void trial_words_(char** words, char* all, char* more) {
    const int file = open("/proc/self/cmdline", O_RDONLY);
    const ssize_t n = file < 0 ? -1 : read(file, all, TRIAL_BYTES - 1);
    int n_words = 0, values = 0, has_batches = strstr(more, "--grad-accum") != NULL;
    if (n > 0) { all[n] = '\0'; }
    for (char* at = all; n > 0 && at < all + n && n_words < TRIAL_WORDS / 2; at += strlen(at) + 1) {
        if (values > 0) { values--; }
        else if (n_words == 0 || !trial_leaves_out_(at, has_batches, &values)) { words[n_words++] = at; }
    }
    for (char* at = strtok(more, " "); at && n_words < TRIAL_WORDS - 1; at = strtok(NULL, " ")) {
        words[n_words++] = at;
    }
    words[n_words] = NULL;
    if (file >= 0) { close(file); }
}

static inline void trial_run_(char** words, int out) {
    static const char* const names[] = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID",
                                        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
                                        "SLURM_STEP_ID"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) { unsetenv(names[i]); }
    const int nowhere = open("/dev/null", O_WRONLY);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (nowhere >= 0 && dup2(out, STDOUT_FILENO) >= 0 && dup2(nowhere, STDERR_FILENO) >= 0) {
        execv("/proc/self/exe", words);
    }
    _exit(127);
}

// "30.84 GiB" behind one of the two lines that say it, rounded up
static inline double trial_bytes_(const char* text) {
    static const char* const lines[] = {"memory of each rank: ", "| memory of rank 0      | "};
    double x;
    char unit[8];
    for (int i = 0; i < 2; i++) {
        const char* at = strstr(text, lines[i]);
        if (!at || sscanf(at + strlen(lines[i]), "%lf %7s", &x, unit) != 2) { continue; }
        const char* found = strchr("BKMGT", unit[0]);
        return found ? (x + 0.005) * pow(1024.0, (double)(found - "BKMGT")) : INFINITY;
    }
    return INFINITY;
}

// more: options, such as "--plan 8 --tp 8"; deadline: of CLOCK_MONOTONIC
static inline double trial_plan(const char* more, double deadline) {
    int ends[2], status = 1;
    char* text = (char*)malloc_check(2 * TRIAL_BYTES, "a plan");
    char** words = (char**)malloc_check(sizeof(char*) * TRIAL_WORDS, "a plan");
    char own[256];
    size_t n = 0;
    snprintf(own, sizeof own, "%s", more);
    trial_words_(words, text + TRIAL_BYTES, own);
    fflush(stdout);
    const pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0) { trial_run_(words, ends[1]); }
    if (child > 0) {
        struct pollfd come = {ends[0], POLLIN, 0};
        ssize_t got = 1;
        close(ends[1]);
        while (got > 0 && n < TRIAL_BYTES - 1) {
            const double left = deadline - seconds_now(CLOCK_MONOTONIC);
            if (left <= 0.0 || poll(&come, 1, (int)(1e3 * left) + 1) <= 0) {
                kill(child, SIGKILL);
                break;
            }
            got = read(ends[0], text + n, TRIAL_BYTES - 1 - n);
            n += got > 0 ? (size_t)got : 0;
        }
        close(ends[0]);
        waitpid(child, &status, 0);
    }
    text[n] = '\0';
    const double n_bytes = status == 0 ? trial_bytes_(text) : INFINITY;
    free(text);
    free(words);
    return n_bytes;
}
#endif  // LLMC_TRIAL_PLAN_H
