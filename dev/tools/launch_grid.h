/*
What launch reads of the trainer's own command: the grid that it asks for, so that a start with fewer hosts has as many
ranks as fit it.
    typed            the value of an option
    fitting_ranks    how many of the ranks that can run
    grid             "--tp 2 --pp 2"
*/
#ifndef LAUNCH_GRID_H
#define LAUNCH_GRID_H
#include "launch_processes.h"  // options, MAX_RANKS

// the value of an option of the trainer, typed as --tp 2 or --tp=2; the last counts. NULL: it was not typed
static const char* typed(const char* name) {
    const char* value = NULL;
    const size_t n = strlen(name);
    for (int i = 1; i < options.n_command; i++) {
        const char* word = options.command[i];
        if (strncmp(word, name, n) != 0) { continue; }
        if (word[n] == '=') { value = word + n + 1; }
        if (word[n] == '\0') { value = i + 1 < options.n_command ? options.command[i + 1] : ""; }
    }
    return value;
}

// its value in the last line of a file of --args that has it, "tp = 2" or "--tp 2"; -1: none has. What is wrong with
// the file the ranks say
static long number_of_args_file(const char* path, const char* name) {
    char line[LINE_BYTES];
    long value = -1;
    struct stat status;
    FILE* file = stat(path, &status) == 0 && S_ISREG(status.st_mode) ? fopen(path, "r") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        char key[NAME_BYTES];
        int at = 0;
        if (sscanf(line, " %255[^ =\t\n]%n", key, &at) < 1) { continue; }
        if (strcmp(key + strspn(key, "-"), name + 2) != 0) { continue; }
        value = strtol(line + at + strspn(line + at, " \t="), NULL, 10);
    }
    if (file) { fclose(file); }
    return value;
}

// of an option that counts something: as typed, else as --args FILE says, else 1
static int typed_number(const char* name) {
    const char *text = typed(name), *path = typed("--args");
    const long x = text ? strtol(text, NULL, 10) : path ? number_of_args_file(path, name) : 1;
    return x > 0 && x <= MAX_RANKS ? (int)x : 1;
}

// a start with fewer ranks than before was refused
static int needs_divisor;

// With --ep, and with several chunks of layers a rank, an update has a multiple of as many micro-batches as ranks, so
// that their number is a divisor of what it was. With --tp of a model with experts, too, which only the ranks know
static int by_divisor(void) { return needs_divisor || typed_number("--ep") > 1 || typed_number("--pp-chunks") > 1; }

// how many of n ranks can train when `before` of them have begun: a multiple of what shares matrices, positions, layers
// and experts
static int fitting_ranks(int n, int before) {
    const long together = (long)typed_number("--tp") * typed_number("--cp"), ep = typed_number("--ep");
    long stage = together;
    while (stage % ep != 0) { stage += together; }
    const long unit = typed_number("--pp") * stage;
    const int divides = by_divisor();
    n = (int)(n - n % unit);
    while (n > 0 && divides && before % n != 0) { n -= (int)unit; }
    return n;
}

// "--tp 2 --pp 2", of those that were typed
static const char* grid(void) {
    static char text[128];
    const char* names[] = {"--tp", "--cp", "--pp", "--ep"};
    size_t n = 0;
    *text = '\0';
    for (int i = 0; i < 4; i++) {
        const int size = typed_number(names[i]);
        if (size > 1) { n += (size_t)snprintf(text + n, sizeof text - n, "%s%s %d", n > 0 ? " " : "", names[i], size); }
    }
    return text;
}
#endif  // LAUNCH_GRID_H
