/*
What a program prints for people: numbers and texts as they read them, the box at the start, the progress bar. ASCII,
but for what users typed, which is UTF-8.
    format_duration, format_count, format_rate, format_bytes, format_float, format_text
                        printf("%s", format_count(n).s)
    box_line, box_row   the box at the start: settings, model, data, memory
    progress, progress_since   a bar for long silent work, on stderr if that is a terminal
    terminal_columns    how wide the terminal is
    seconds_now         a clock, to measure with or for dates
*/
#ifndef LLMC_PRINT_H
#define LLMC_PRINT_H
#include "fail.h"  // plain_text
#include <locale.h>
#include <math.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>

// ---- numbers and texts as people read them: printf("%s", format_count(n).s) ----

typedef struct {
    char s[128];
} ShortText;

// seconds, to the nearest, as "45s", "1m17s", "2h05m" or "3d04h"
static inline ShortText format_duration(double seconds) {
    ShortText out = {"?"};
    if (!(seconds >= 0.0 && seconds < 1e12)) { return out; }
    long long s = (long long)(seconds + 0.5), m = s / 60, h = m / 60;
    if (h >= 24) { snprintf(out.s, sizeof out.s, "%lldd%02lldh", h / 24, h % 24); }
    else if (h > 0) { snprintf(out.s, sizeof out.s, "%lldh%02lldm", h, m % 60); }
    else if (m > 0) { snprintf(out.s, sizeof out.s, "%lldm%02llds", m, s % 60); }
    else { snprintf(out.s, sizeof out.s, "%llds", s); }
    return out;
}

// a count as "512", "25.0k", "124.5M", "6.9B" or "1.4T"
static inline ShortText format_count(double n) {
    const char* units[] = {"", "k", "M", "B", "T"};
    ShortText out;
    int u = 0;
    while (fabs(n) >= (u ? 999.95 : 999.5) && u < 4) { n /= 1000.0; u++; }  // from there on it would print as 1000
    snprintf(out.s, sizeof out.s, "%.*f%s", u ? 1 : 0, n, units[u]);
    return out;
}

// flop/s as "164.2 GFLOP/s" or "989 TFLOP/s"
static inline ShortText format_rate(double flops) {
    ShortText out;
    snprintf(out.s, sizeof out.s, flops < 1e12 ? "%.1f GFLOP/s" : "%.0f TFLOP/s",
             flops < 1e12 ? 1e-9 * flops : 1e-12 * flops);
    return out;
}

// bytes as "512 B", "1.50 KiB" or "2.21 GiB"
static inline ShortText format_bytes(double n_bytes) {
    const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    ShortText out;
    int u = 0;
    while (fabs(n_bytes) >= (u ? 1023.995 : 1023.5) && u < 4) { n_bytes /= 1024.0; u++; }
    snprintf(out.s, sizeof out.s, "%.*f %s", u ? 2 : 0, n_bytes, units[u]);
    return out;
}

// a float with the fewest digits that read back to the same bits: 0.1, 3e-08, 0.333333343
static inline ShortText format_float(float x) {
    ShortText out;
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(out.s, sizeof out.s, "%.*g", digits, (double)x);
        if (strtof(out.s, NULL) == x) { break; }
    }
    return out;
}

// the double of that text: as JSON it is written as people write it, 1e-05, and cast to float it is x
static inline double shortest_double(float x) {
    const double shortest = strtod(format_float(x).s, NULL);
    return (float)shortest == x ? shortest : (double)x;
}

// a text from outside for one line of a message: plain, and past 60 bytes cut off with "..."
static inline ShortText format_text(const char* text) {
    ShortText out;
    snprintf(out.s, sizeof out.s, "%.60s%s", text, strlen(text) > 60 ? "..." : "");
    plain_text(out.s);
    return out;
}

// ---- the terminal ----

// columns of the terminal that standard output is; 0: it is none, or does not say
static inline int terminal_columns(void) {
    struct winsize size;
    const int says = isatty(STDOUT_FILENO) && ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
    return says ? size.ws_col : 0;
}

// bytes of the longest beginning of a UTF-8 text, in whole characters, that fills at most n_columns, and how many it
// fills: a Chinese character takes two, an accent none. A byte that is not UTF-8 takes one
static inline size_t text_that_fits(const char* text, int n_columns, int* columns) {
    const size_t n_bytes = strlen(text);
    size_t used = 0;
    mbstate_t state;
    memset(&state, 0, sizeof state);
    const locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0), before = utf8 ? uselocale(utf8) : utf8;
    for (*columns = 0; used < n_bytes;) {
        wchar_t c;
        const size_t n = mbrtowc(&c, text + used, n_bytes - used, &state);
        const int is_character = n <= n_bytes - used, width = is_character ? wcwidth(c) : 1;
        if (!is_character) { memset(&state, 0, sizeof state); }
        if (*columns + (width < 0 ? 1 : width) > n_columns) { break; }
        *columns += width < 0 ? 1 : width;
        used += is_character ? n : 1;
    }
    if (utf8) {
        uselocale(before);
        freelocale(utf8);
    }
    return used;
}

// ---- the box at the start (settings, model, data, memory) and the progress bar ----

static inline void box_line(void) {
    printf("+-----------------------+----------------------------------------------------+\n");
}

// bytes of a text for one line: up to the last blank, comma or slash that fits, or where there is none all that fit
static inline int text_line_length_(const char* text, int n_columns, int* columns) {
    int n = (int)text_that_fits(text, n_columns, columns), cut = n;
    if (!text[n]) { return n; }
    while (cut > n / 2 && !strchr(" ,/", text[cut - 1])) { cut--; }
    if (cut > n / 2) {
        char line[512];
        n = snprintf(line, sizeof line, "%.*s", cut, text);
        text_that_fits(line, n_columns, columns);
    }
    return n;
}

// | name                  | value                                              |   a long value goes on below
__attribute__((format(printf, 2, 3)))
static inline void box_row(const char* name, const char* format, ...) {
    const int width = 50;
    char value[4096];
    const char* rest = value;
    va_list args;
    va_start(args, format);
    vsnprintf(value, sizeof value, format, args);
    va_end(args);
    plain_text(value);
    do {
        int columns;
        const int n = text_line_length_(rest, width, &columns);
        printf("| %-21s | %.*s%*s |\n", rest == value ? name : "", n, rest, width - columns, "");
        rest += n;
        rest += strspn(rest, " ");
    } while (*rest);
}

// CLOCK_MONOTONIC to measure with, CLOCK_REALTIME for seconds since 1970
static inline double seconds_now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// isatty changes errno, which the work under a bar may be about to report
static inline int stderr_is_terminal_(void) {
    const int error = errno, is_terminal = isatty(STDERR_FILENO);
    errno = error;
    return is_terminal;
}

// A bar for long silent work, on stderr and only if that is a terminal: call it as often as you like, it draws at most
// ten times a second, and not before 0.3 s have gone since the work began. The call with done == total clears the line.
// Only the main thread draws. began: by CLOCK_MONOTONIC
static inline void progress_since(double began, const char* what, int64_t done, int64_t total) {
    // when it was drawn, 0: not yet. State of a thing every process has once, its terminal line
    static double drawn = 0.0;
    const double now = seconds_now(CLOCK_MONOTONIC);
    if (gettid() != getpid()) { return; }
    if (done >= total) {
        if (drawn > 0.0) { fprintf(stderr, "%79s\r", ""); }
        drawn = 0.0;
        return;
    }
    if (now - began < 0.3 || now - drawn < 0.1 || !stderr_is_terminal_()) { return; }
    // the cursor goes back to the start of the line, so that a message that comes now writes over the bar
    const char* bar = "##############################";
    const double share = (double)done / (double)total;
    drawn = now;
    fprintf(stderr, "%-36.36s [%-30.*s] %3.0f%%\r", what, (int)(30.0 * share), bar, 100.0 * share);
    fflush(stderr);
}

// the same of work that began with the first call after the last bar's end
static inline void progress(const char* what, int64_t done, int64_t total) {
    static double began = 0.0;
    if (gettid() != getpid()) { return; }
    if (began == 0.0) { began = seconds_now(CLOCK_MONOTONIC); }
    progress_since(began, what, done, total);
    if (done >= total) { began = 0.0; }
}
#endif  // LLMC_PRINT_H
