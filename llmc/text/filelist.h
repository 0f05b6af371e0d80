/*
The files behind a path as a user gives it: a file, a pattern (*, ?, []) or a folder.
A pattern gives the files it matches, in byte order of their paths. A folder is walked depth first, names in byte order.
Left out are hidden files and folders, symbolic links, folders named build, runs, __pycache__, node_modules or .venv,
folders of runs (they hold settings.json and metrics.jsonl), and what a .gitignore says, in the folder or in one inside
it (those above the folder are not looked for):
    # comment       blank lines and lines with # are skipped, as are spaces at the end of a line
    name  *.log     files and folders of that name, wherever they are below; *, ? and [] as in a shell (fnmatch)
    name/           folders only
    /name  a/b      a slash at the start or inside: the path from the .gitignore's folder, where * stops at a slash
    !name           taken after all; the last line that matches decides, a .gitignore further down before one above
    \#name          the sign itself
Of git's language only two stars inside a path are missing: they match one name, not any number of folders. As in git,
nothing below a folder that is left out can be brought back.
Errors: fail_input for what cannot be listed, examined or matched by anything.
*/
#ifndef LLMC_FILELIST_H
#define LLMC_FILELIST_H
#include "../core/fail.h"
#include "../core/mapfile.h"  // MappedFile, file_map, file_unmap
#include <dirent.h>
#include <fnmatch.h>
#include <glob.h>

typedef struct {
    char** paths;
    int n;
    int in_folder;  // found by walking, so what is not text is passed over
} FileList;

static inline void file_list_add_(FileList* list, const char* path) {
    if ((list->n & (list->n - 1)) == 0) {  // a power of two: full
        size_t n_grown = list->n ? 2 * (size_t)list->n : 1;
        list->paths = (char**)realloc_check(list->paths, n_grown * sizeof(char*), "list of files");
    }
    list->paths[list->n++] = string_copy(path);
}

static inline void file_list_free(FileList* list) {
    for (int i = 0; i < list->n; i++) { free(list->paths[i]); }
    free(list->paths);
}

// ---- .gitignore ----

typedef struct {
    char* pattern;     // for fnmatch, without the signs below
    int negated;       // ! at the start
    int folders_only;  // / at the end
    int anchored;      // / elsewhere: the path below the .gitignore must match, not the name alone
} IgnoreRule;

typedef struct IgnoreFile {
    const struct IgnoreFile* above;  // of the folder around, NULL at the top
    size_t n_folder;                 // length of the path of its own folder, without a slash at the end
    IgnoreRule* rules;
    int n_rules;
} IgnoreFile;

// one line, not terminated
static inline void ignore_line_(IgnoreFile* f, const char* line, size_t n) {
    IgnoreRule rule = {NULL, 0, 0, 0};
    if (n > 0 && line[n - 1] == '\r') { n--; }
    while (n > 0 && line[n - 1] == ' ' && (n < 2 || line[n - 2] != '\\')) { n--; }
    if (n > 0 && line[0] == '#') { return; }
    if (n > 0 && line[0] == '!') { rule.negated = 1, line++, n--; }
    if (n > 0 && line[n - 1] == '/') { rule.folders_only = 1, n--; }
    if (n > 3 && memcmp(line, "**/", 3) == 0 && !memchr(line + 3, '/', n - 3)) { line += 3, n -= 3; }
    rule.anchored = n > 0 && memchr(line, '/', n) != NULL;
    if (n > 0 && line[0] == '/') { line++, n--; }
    if (n == 0) { return; }
    rule.pattern = (char*)malloc_check(n + 1, "pattern of a .gitignore");
    memcpy(rule.pattern, line, n);
    rule.pattern[n] = '\0';
    f->rules = (IgnoreRule*)realloc_check(f->rules, (size_t)(f->n_rules + 1) * sizeof rule, "rules of a .gitignore");
    f->rules[f->n_rules++] = rule;
}

// the whole reader on bytes in memory; whatever they are, they are some rules
static inline void ignore_parse_(IgnoreFile* f, const unsigned char* bytes, size_t n_bytes) {
    for (size_t at = 0, n; at < n_bytes; at += n + 1) {
        const unsigned char* newline = (const unsigned char*)memchr(bytes + at, '\n', n_bytes - at);
        n = newline ? (size_t)(newline - bytes) - at : n_bytes - at;
        ignore_line_(f, (const char*)bytes + at, n);
    }
}

static inline void ignore_open_(IgnoreFile* f, const char* folder, const IgnoreFile* above) {
    struct stat status;
    memset(f, 0, sizeof *f);
    f->above = above;
    f->n_folder = strlen(folder) - (size_t)ends_with(folder, "/");
    char* path = path_joined(folder, ".gitignore");
    if (lstat(path, &status) == 0 && S_ISREG(status.st_mode)) {
        MappedFile file;
        file_map(&file, path);
        ignore_parse_(f, file.bytes, file.n_bytes);
        file_unmap(&file);
    }
    free(path);
}

static inline void ignore_free_(IgnoreFile* f) {
    for (int i = 0; i < f->n_rules; i++) { free(f->rules[i].pattern); }
    free(f->rules);
}

// what the last matching rule says of a path below f's folder: 1 left out, 0 taken; -1 when none matches
static inline int ignore_verdict_(const IgnoreFile* f, const char* path, int is_folder) {
    const char *below = path + f->n_folder + 1, *name = strrchr(path, '/') + 1;
    for (int i = f->n_rules - 1; i >= 0; i--) {
        const IgnoreRule* rule = &f->rules[i];
        if (rule->folders_only && !is_folder) { continue; }
        if (fnmatch(rule->pattern, rule->anchored ? below : name, FNM_PATHNAME) == 0) { return !rule->negated; }
    }
    return -1;
}

static inline int ignore_says_(const IgnoreFile* f, const char* path, int is_folder) {
    for (; f; f = f->above) {
        int verdict = ignore_verdict_(f, path, is_folder);
        if (verdict >= 0) { return verdict; }
    }
    return 0;
}

// ---- folders, patterns, files ----

static inline int file_list_compare_paths_(const void* a, const void* b) {
    return strcmp(*(char* const*)a, *(char* const*)b);
}

static inline int file_list_compare_(const struct dirent** a, const struct dirent** b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

static inline int file_list_is_build_folder_(const char* name) {
    const char* names[] = {"build", "runs", "__pycache__", "node_modules", ".venv"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i]) == 0) { return 1; }
    }
    return 0;
}

// the folder of a run, whose log and samples are no text to train on
static inline int file_list_is_run_(const char* folder) {
    const char* names[] = {"settings.json", "metrics.jsonl"};
    int n = 0;
    for (int i = 0; i < 2; i++) {
        char* path = path_joined(folder, names[i]);
        n += access(path, F_OK) == 0;
        free(path);
    }
    return n == 2;
}

static inline void file_list_walk_(FileList* list, const char* folder, const IgnoreFile* above) {
    struct dirent** entries;
    IgnoreFile ignore;
    int n = scandir(folder, &entries, NULL, file_list_compare_);
    if (n < 0) { fail_input("%s: cannot be listed: %s", folder, strerror(errno)); }
    ignore_open_(&ignore, folder, above);
    for (int i = 0; i < n; i++) {
        const char* name = entries[i]->d_name;
        struct stat status;
        char* path = path_joined(folder, name);
        if (name[0] != '.') {  // hidden, and the folder itself and the one above it
            if (lstat(path, &status) != 0) { fail_input("%s: cannot be examined: %s", path, strerror(errno)); }
            const int is_file = S_ISREG(status.st_mode), is_folder = S_ISDIR(status.st_mode);
            const int is_left_out = ignore_says_(&ignore, path, is_folder);
            if (is_file && !is_left_out) { file_list_add_(list, path); }
            if (is_folder && !is_left_out && !file_list_is_build_folder_(name) && !file_list_is_run_(path)) {
                file_list_walk_(list, path, &ignore);
            }
        }
        free(path);
        free(entries[i]);
    }
    free(entries);
    ignore_free_(&ignore);
}

// files a pattern matches, in byte order whatever the locale
static inline void file_list_match_(FileList* list, const char* pattern) {
    glob_t matches;
    int status = glob(pattern, GLOB_NOSORT, NULL, &matches);
    if (status == GLOB_NOMATCH) {
        fail_input("%s: expected a file, a folder or a pattern, found nothing of that name", pattern);
    }
    if (status != 0) { fail_input("%s: the pattern cannot be followed: %s", pattern, strerror(errno)); }
    for (size_t i = 0; i < matches.gl_pathc; i++) { file_list_add_(list, matches.gl_pathv[i]); }
    globfree(&matches);
    qsort(list->paths, (size_t)list->n, sizeof(char*), file_list_compare_paths_);
}

static inline void file_list_make(FileList* list, const char* path) {
    struct stat status;
    memset(list, 0, sizeof *list);
    if (stat(path, &status) != 0) {
        if (errno != ENOENT) { fail_input("%s: cannot be examined: %s", path, strerror(errno)); }
        file_list_match_(list, path);
    } else if (S_ISDIR(status.st_mode)) {
        char* folder = string_copy(path);
        for (size_t n = strlen(folder); n > 1 && folder[n - 1] == '/'; n--) { folder[n - 1] = '\0'; }
        list->in_folder = 1;
        file_list_walk_(list, folder, NULL);
        free(folder);
    } else {
        file_list_add_(list, path);
    }
}
#endif  // LLMC_FILELIST_H
