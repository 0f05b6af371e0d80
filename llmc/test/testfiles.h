/*
Files for tests: a folder of its own for each promise, gone afterwards; and files that are only in memory (heap_copy).
    TempPath folder = temp_folder();
    TempPath file = temp_file(&folder, "a/b.txt", "text", 4);  // file.s is its path; makes folder a
    temp_remove(&folder);
*/
#ifndef LLMC_TESTFILES_H
#define LLMC_TESTFILES_H
#include "../core/fail.h"
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { char s[512]; } TempPath;

static inline TempPath temp_folder(void) {
    TempPath folder;
    const char* parent = getenv("TMPDIR");
    snprintf(folder.s, sizeof folder.s, "%s/llmc_test_XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(folder.s)) { fail_run("%s: cannot be created: %s", folder.s, strerror(errno)); }
    return folder;
}

static inline TempPath temp_path(const TempPath* folder, const char* name) {
    TempPath path;
    int n = snprintf(path.s, sizeof path.s, "%s/%s", folder->s, name);
    if (n < 0 || (size_t)n >= sizeof path.s) { fail_run("%s/%s: too long a path for a test", folder->s, name); }
    for (char* slash = path.s + strlen(folder->s) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = '\0';
        int failed = mkdir(path.s, 0777) != 0 && errno != EEXIST;
        if (failed) { fail_run("%s: cannot be created: %s", path.s, strerror(errno)); }
    }
    return path;
}

static inline TempPath temp_file(const TempPath* folder, const char* name, const void* bytes, size_t n_bytes) {
    TempPath path = temp_path(folder, name);
    FILE* file = fopen(path.s, "wb");
    if (!file) { fail_run("%s: cannot be created: %s", path.s, strerror(errno)); }
    if (fwrite(bytes, 1, n_bytes, file) != n_bytes) { fail_run("%s: cannot be written: %s", path.s, strerror(errno)); }
    if (fclose(file) != 0) { fail_run("%s: cannot be written: %s", path.s, strerror(errno)); }
    return path;
}

// a copy in a heap block of exactly its size: a sanitizer sees a parser that reads one byte too far
static inline unsigned char* heap_copy(const void* bytes, size_t n_bytes) {
    unsigned char* copy = (unsigned char*)calloc(n_bytes, 1);
    if (!copy && n_bytes > 0) { fail_run("copy of a file: no memory for %zu bytes", n_bytes); }
    if (n_bytes > 0) { memcpy(copy, bytes, n_bytes); }
    return copy;
}

static inline void temp_remove(const TempPath* path) {
    if (remove(path->s) == 0) { return; }  // a file, a link or an empty folder
    DIR* folder = opendir(path->s);
    if (!folder) { fail_run("%s: cannot be removed: %s", path->s, strerror(errno)); }
    for (struct dirent* entry; (entry = readdir(folder));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) { continue; }
        TempPath inside = temp_path(path, entry->d_name);
        temp_remove(&inside);
    }
    closedir(folder);
    if (rmdir(path->s) != 0) { fail_run("%s: cannot be removed: %s", path->s, strerror(errno)); }
}
#endif  // LLMC_TESTFILES_H
