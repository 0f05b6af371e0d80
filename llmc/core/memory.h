/*
Memory of this machine that is free, asked before much of it is taken: Linux promises more than there is, and ends the
process that uses it.
    memory_free   bytes that could be had without swapping: in this container if there is one; 0 where nobody knows
    memory_need   fail_run, with what it is for, when so many bytes are not there; below 64 MiB nobody is asked
    stack_check   fail_input where the limit of the stack is one that no program here lives in
*/
#ifndef LLMC_MEMORY_H
#define LLMC_MEMORY_H
#include "print.h"  // format_bytes, fail_run
#include <math.h>
#include <sys/resource.h>
#include <unistd.h>

// number behind `key` in a file of "key number" lines, the file's only number for key ""; -1 when there is none
static inline double memory_number_in_file_(const char* path, const char* key) {
    char line[512];
    double found = -1.0;
    const size_t n_key = strlen(key);
    FILE* file = fopen(path, "r");
    while (file && found < 0.0 && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, n_key) == 0) { sscanf(line + n_key, "%lf", &found); }
    }
    if (file) { fclose(file); }
    return found;
}

// what the control group `group` below `folder` leaves; pages of files that could be dropped do not count as used
static inline double memory_cgroup_free_(const char* folder, const char* group, const char* limit, const char* used,
                                       const char* files) {
    char path[3][1024];
    const char* names[3] = {limit, used, "memory.stat"};
    for (int i = 0; i < 3; i++) { snprintf(path[i], sizeof path[i], "%s%s/%s", folder, group, names[i]); }
    if (*group && access(path[0], R_OK) != 0) {  // a container sees its own group as the root
        return memory_cgroup_free_(folder, "", limit, used, files);
    }
    double most = memory_number_in_file_(path[0], ""), now = memory_number_in_file_(path[1], "");
    double droppable = memory_number_in_file_(path[2], files);
    return most > 0.0 && now >= 0.0 ? most - now + fmax(droppable, 0.0) : INFINITY;
}

// what the limits of this process's control group leave, as a container has one; both versions of the interface
static inline double memory_cgroup_available_(void) {
    char line[512];
    double available = INFINITY;
    FILE* file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        const char* v1 = strstr(line, ":memory:");
        if (v1) {
            available = fmin(available, memory_cgroup_free_("/sys/fs/cgroup/memory", v1 + 8, "memory.limit_in_bytes",
                                                          "memory.usage_in_bytes", "total_inactive_file "));
        } else if (strncmp(line, "0::", 3) == 0) {
            available = fmin(available, memory_cgroup_free_("/sys/fs/cgroup", line + 3, "memory.max", "memory.current",
                                                          "inactive_file "));
        }
    }
    if (file) { fclose(file); }
    return available;
}

static inline double memory_free(void) {
    double kib = memory_number_in_file_("/proc/meminfo", "MemAvailable:");
    return kib > 0.0 ? fmin(1024.0 * kib, memory_cgroup_available_()) : 0.0;
}

static inline void memory_need(size_t n_bytes, const char* what) {
    if (n_bytes < (size_t)64 << 20) { return; }
    const double n_free = memory_free();
    if (n_free > 0.0 && (double)n_bytes > n_free) {
        fail_run("%s: needs %s of memory, %s are free", what, format_bytes((double)n_bytes).s, format_bytes(n_free).s);
    }
}

enum { STACK_KIB = 256 };  // with which everything is tested; large arrays are on the heap

static inline void stack_check(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_STACK, &limit) == 0 && limit.rlim_cur < (rlim_t)STACK_KIB << 10) {
        fail_input("stack: expected a limit of at least %d KiB, found %d: ulimit -s 8192", STACK_KIB,
                   (int)(limit.rlim_cur >> 10));
    }
}
#endif  // LLMC_MEMORY_H
