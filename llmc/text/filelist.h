/*
The files behind a path as a user gives it: a file, a pattern (*, ?, []) or a folder.
A pattern gives the files it matches, in byte order of their paths. A folder is walked depth first, names in byte order.
Left out are hidden files and folders, symbolic links, folders named build, runs, __pycache__, node_modules or .venv,
folders of runs (they hold settings.json and metrics.jsonl), and what a .gitignore says, in the folder or in one inside it (those above the folder are not looked for):
    # comment       blank lines and lines with # are skipped, as are spaces at the end of a line
    name  *.log     files and folders of that name, wherever they are below; *, ? and [] as in a shell (fnmatch)
    name/           folders only
    /name  a/b      a slash at the start or inside: the path from the .gitignore's folder, where * stops at a slash
    !name           taken after all; the last line that matches decides, a .gitignore further down before one above
    \#name          the sign itself
Of git's language only two stars inside a path are missing: they match one name, not any number of folders. As in git,
nothing below a folder that is left out can be brought back.
path_list_make cuts the text of an option into several such paths (blanks around a comma do not count):
    books.txt,code/               two paths
    books.txt:3,code/:1           with weights, numbers above 0, at most 1e9: what they mean is the reader's (dataloader.h)
    a\,b.txt:3,c\:d/:1            \, and \: are a comma and a colon in a name; so is a colon with a slash behind it
path_from and path_list_from say what a path that was meant from another folder is from here.
A text that names something as it stands, commas and colons included, is one path; so is, between commas, a name with a
colon. All paths have weights, or none. The same path may come twice.
Errors: fail_input for what cannot be listed, examined or matched by anything, and for a weight that is none.
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
    size_t n_folder;                 // length of the path of its own folder
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
    f->n_folder = strlen(folder);
    char* path = (char*)malloc_check(f->n_folder + sizeof "/.gitignore", "path");
    sprintf(path, "%s/.gitignore", folder);
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
        char* path = (char*)malloc_check(strlen(folder) + strlen(names[i]) + 2, "path");
        sprintf(path, "%s/%s", folder, names[i]);
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
        char* path = (char*)malloc_check(strlen(folder) + strlen(name) + 2, "path");
        sprintf(path, "%s/%s", folder, name);
        if (name[0] != '.') {  // hidden, and the folder itself and the one above it
            if (lstat(path, &status) != 0) { fail_input("%s: cannot be examined: %s", path, strerror(errno)); }
            int is_file = S_ISREG(status.st_mode),
                is_folder = S_ISDIR(status.st_mode) && !file_list_is_build_folder_(name);
            if (is_file && !ignore_says_(&ignore, path, 0)) { file_list_add_(list, path); }
            if (is_folder && !ignore_says_(&ignore, path, 1) && !file_list_is_run_(path)) { file_list_walk_(list, path, &ignore); }
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

// ---- several paths in one text ----

enum { MAX_PATHS = 64 };

typedef struct {
    char* path;     // for file_list_make
    double weight;  // 0: none was given
} WeightedPath;

typedef struct {
    WeightedPath of[MAX_PATHS];
    int n;
} PathList;

// a file, a folder or a pattern that matches something
static inline int path_finds_(const char* path) {
    struct stat status;
    glob_t matches;
    if (stat(path, &status) == 0) { return 1; }
    if (glob(path, GLOB_NOSORT, NULL, &matches) != 0) { return 0; }
    globfree(&matches);
    return 1;
}

// the last such sign that has no backslash before it, or NULL
static inline char* path_last_(char* text, char sign) {
    for (char* at = text + strlen(text); at > text; at--) {
        if (at[-1] == sign && (at - 1 == text || at[-2] != '\\')) { return at - 1; }
    }
    return NULL;
}

// \, and \: become the signs alone; other backslashes are for glob
static inline void path_unquote_(char* path) {
    char* to = path;
    for (const char* from = path; *from; from++) {
        if (*from == '\\' && (from[1] == ',' || from[1] == ':')) { continue; }
        *to++ = *from;
    }
    *to = '\0';
}

// PATH or PATH:WEIGHT, without blanks around it; becomes the path alone. Returns the weight, 0 where there is none.
static inline double path_take_weight_(char* part) {
    char *colon = path_finds_(part) ? NULL : path_last_(part, ':'), *end;
    if (!colon || strchr(colon, '/')) {
        path_unquote_(part);
        return 0.0;
    }
    const char* text = colon + 1;
    const int is_number = *text && !text[strspn(text, "+-.0123456789eE")];  // strtod also takes nan, inf, hexadecimal
    const double weight = is_number ? strtod(text, &end) : 0.0;
    if (!is_number || *end || weight <= 0.0 || weight > 1e9) {
        fail_input("%s: expected a weight above 0, at most 1e9, after the colon, as in books.txt:3, found \"%s\" (a "
                   "colon in a name is typed \\:)", part, text);
    }
    *colon = '\0';
    if (!*part) { fail_input(":%s: expected a path before the colon, found nothing", text); }
    path_unquote_(part);
    return weight;
}

static inline void path_list_add_(PathList* list, const char* begin, size_t n, const char* whole) {
    const char* blanks = " \t\n";
    char part[4096];
    while (n > 0 && strchr(blanks, *begin)) { begin++, n--; }
    while (n > 0 && strchr(blanks, begin[n - 1])) { n--; }
    if (n == 0) { fail_input("%s: expected a path on each side of a comma, found nothing", whole); }
    if (n >= sizeof part) { fail_input("%.40s...: this path is too long", begin); }
    if (list->n == MAX_PATHS) {
        fail_input("%s: expected at most %d paths, found more: a pattern or a folder names many files", whole,
                   MAX_PATHS);
    }
    memcpy(part, begin, n);
    part[n] = '\0';
    const double weight = path_take_weight_(part);
    if (list->n > 0 && (weight > 0.0) != (list->of[0].weight > 0.0)) {
        const char* lacks = weight > 0.0 ? list->of[0].path : part;
        fail_input("%s: expected a weight, as other paths have one, found none (%s:1)", lacks, lacks);
    }
    list->of[list->n].path = string_copy(part);
    list->of[list->n++].weight = weight;
}

static inline void path_list_make(PathList* list, const char* text) {
    memset(list, 0, sizeof *list);
    if (!strpbrk(text, ",:") || path_finds_(text)) {
        list->of[list->n++].path = string_copy(text);
        return;
    }
    for (const char *begin = text, *end = text;; end++) {
        if (*end && (*end != ',' || (end > begin && end[-1] == '\\'))) { continue; }
        path_list_add_(list, begin, (size_t)(end - begin), text);
        if (!*end) { return; }
        begin = end + 1;
    }
}

static inline void path_list_free(PathList* list) {
    for (int i = 0; i < list->n; i++) { free(list->of[i].path); }
}

// `path` as it is found from `folder`, where there is such a thing; else as it is. On the heap
static inline char* path_from(const char* folder, const char* path) {
    char* joined = (char*)malloc_check(strlen(folder) + strlen(path) + 2, "path");
    sprintf(joined, "%s/%s", folder, path);
    if (*path && *path != '/' && path_finds_(joined)) { return joined; }
    free(joined);
    return string_copy(path);
}

// the same for a text of several
static inline char* path_list_from(const char* folder, const char* text) {
    PathList list;
    char* joined;
    size_t n_bytes;
    path_list_make(&list, text);
    FILE* out = open_memstream(&joined, &n_bytes);
    if (!out) { fail_run("paths: no memory"); }
    for (int i = 0; i < list.n; i++) {
        const double weight = list.of[i].weight;
        char* path = path_from(folder, list.of[i].path);
        if (i > 0) { fputc(',', out); }
        for (const char* c = path; *c; c++) {
            fprintf(out, "%s%c", (list.n > 1 || weight > 0.0) && (*c == ',' || *c == ':') ? "\\" : "", *c);
        }
        if (weight > 0.0) { fprintf(out, ":%.17g", weight); }
        free(path);
    }
    fclose(out);
    path_list_free(&list);
    return joined;
}
#endif  // LLMC_FILELIST_H
