/*
Several paths in the text of one option, with weights or without.
    path_list_make   cuts the text at its commas (blanks around a comma do not count):
        books.txt,code/               two paths
        books.txt:3,code/:1           with weights, numbers above 0, at most 1e9; what they mean: dataloader.h
        a\,b.txt:3,c\:d/:1            \, and \: are a comma and a colon in a name; so is a colon with a slash behind it
    path_from, path_list_from   what a path, or such a text, that was meant from another folder is from here
A text that names something as it stands, commas and colons included, is one path; so is, between commas, a name with a
colon. All paths have weights, or none. The same path may come twice. What a path stands for: filelist.h.
Errors: fail_input for a path that is empty or too long, more than MAX_PATHS of them, and a weight that is none.
*/
#ifndef LLMC_PATHLIST_H
#define LLMC_PATHLIST_H
#include "../core/fail.h"
#include <glob.h>
#include <sys/stat.h>

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
    char* joined = path_joined(folder, path);
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
#endif  // LLMC_PATHLIST_H
