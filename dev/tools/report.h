/*
A JSON object as a page of text: what `inspect` found, printed for people or, with --json, as it is.
    report_facts   name and value on a line each, an object wrapped over several
    report_table   an array of objects as a table under an empty line: a row each, columns as given, the first cut to the
                   terminal's width; nothing of an empty array
A number is shown as its key asks: "...bytes" as KiB and MiB, "...loss" with more digits, "...sampler", the state of a
generator, as 64 bits in hexadecimal; integers in groups of three, lists of them in parentheses, as shapes are. Other
lists are shown as JSON has them, with the nine digits that make a float.
*/
#ifndef TOOLS_REPORT_H
#define TOOLS_REPORT_H
#include "llmc/core/fail.h"   // ends_with, plain_text, string_copy, malloc_check
#include "llmc/core/print.h"  // format_bytes, format_text
#include <jansson.h>
#include <sys/ioctl.h>
#include <unistd.h>

// columns of the terminal; a file or a pipe takes lines of any length
static inline int report_width(void) {
    struct winsize size;
    if (!isatty(STDOUT_FILENO)) { return 1 << 20; }
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 60 ? size.ws_col : 80;
}

// a number that JSON may not have is a text: "nan", "inf", "-inf"
static inline json_t* report_number(double x) {
    if (isfinite(x)) { return json_real(x); }
    return json_string(isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

// ---- one value as text, to be freed ----

// 1234567 as "1,234,567"
static inline void report_digits_(char text[32], long long n) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%lld", n), used = 0;
    for (int i = 0; i < length; i++) {
        text[used++] = digits[i];
        int left = length - 1 - i;
        if (left > 0 && left % 3 == 0 && digits[i] != '-') { text[used++] = ','; }
    }
    text[used] = '\0';
}

// a list of integers as a shape, any other as it is
static inline char* report_list_(const json_t* shape) {
    for (size_t i = 0; i < json_array_size(shape); i++) {
        if (!json_is_integer(json_array_get(shape, i))) { return json_dumps(shape, JSON_REAL_PRECISION(9)); }
    }
    size_t room = 24 * json_array_size(shape) + 3, used = 1;
    char* text = (char*)malloc_check(room, "shape");
    text[0] = '(';
    for (size_t i = 0; i < json_array_size(shape); i++) {
        long long dim = json_integer_value(json_array_get(shape, i));
        used += (size_t)snprintf(text + used, room - used, "%s%lld", i ? ", " : "", dim);
    }
    snprintf(text + used, room - used, ")");
    return text;
}

static inline char* report_text(const char* key, const json_t* value) {
    char text[160] = "-";
    if (json_is_string(value)) {
        char* copy = string_copy(json_string_value(value));
        plain_text(copy);
        return copy;
    }
    if (json_is_array(value)) { return report_list_(value); }
    if (json_is_boolean(value)) { snprintf(text, sizeof text, "%s", json_is_true(value) ? "yes" : "no"); }
    int digits = ends_with(key, "loss") ? 6 : 4;
    if (json_is_real(value)) { snprintf(text, sizeof text, "%.*g", digits, json_real_value(value)); }
    if (json_is_integer(value)) {
        long long n = json_integer_value(value);
        if (ends_with(key, "sampler")) { snprintf(text, sizeof text, "0x%016llx", (unsigned long long)n); }
        else if (ends_with(key, "bytes")) { snprintf(text, sizeof text, "%s", format_bytes((double)n).s); }
        else { report_digits_(text, n); }
    }
    return string_copy(text);
}

// ---- facts ----

// the members of an object as "n_layer 12, n_head 12", wrapped; empty texts are left out
static inline void report_members_(const json_t* object, int from) {
    const char* key;
    json_t* value;
    int width = report_width() < 100 ? report_width() : 100, column = from;
    json_object_foreach((json_t*)object, key, value) {
        if (json_is_string(value) && !*json_string_value(value)) { continue; }
        const int is_dumped = !json_is_string(value) && !json_is_real(value) && !ends_with(key, "sampler");
        char* text = is_dumped ? json_dumps(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9))
                               : report_text(json_is_real(value) ? "loss" : key, value);
        int length = (int)(strlen(key) + strlen(text)) + 3;
        int is_first = column == from, wraps = column + length > width;
        if (!is_first) { column += printf(","); }
        if (!is_first && wraps) { column = printf("\n%*s", from, "") - 1; }
        else if (!is_first) { column += printf(" "); }
        column += printf("%s %s", format_text(key).s, text);
        free(text);
    }
    printf("%s\n", column == from ? "-" : "");
}

static inline void report_facts(const json_t* facts) {
    const char* key;
    json_t* value;
    json_object_foreach((json_t*)facts, key, value) {
        ShortText name = format_text(key);
        for (char* c = name.s; *c; c++) { *c = *c == '_' ? ' ' : *c; }
        printf("  %-16s ", name.s);
        if (json_is_object(value)) {
            report_members_(value, 19);
            continue;
        }
        char* text = report_text(key, value);
        printf("%s\n", text);
        free(text);
    }
}

// ---- tables ----

typedef struct {
    const char* key;    // of the rows' objects
    const char* title;
    int to_the_right;   // numbers
} ReportColumn;

enum { REPORT_COLUMNS_MAX = 12 };

// a name too long for its column loses its beginning, which its neighbours have too
static inline void report_shorten_(char* name, size_t width) {
    size_t n = strlen(name);
    if (n <= width) { return; }
    memmove(name + 3, name + n - (width - 3), width - 2);
    memcpy(name, "...", 3);
}

static inline void report_cell_(const char* text, size_t width, int to_the_right, int is_last) {
    if (to_the_right) { printf("  %*s", (int)width, text); }
    else if (!is_last) { printf("  %-*s", (int)width, text); }
    else if (*text) { printf("  %s", text); }
}

static inline void report_table(const json_t* rows, const ReportColumn* columns, int n_columns) {
    size_t width[REPORT_COLUMNS_MAX], n = json_array_size(rows), all = 0;
    if (n == 0) { return; }
    char** cells = (char**)malloc_check(n * (size_t)n_columns * sizeof(char*), "table");
    for (int c = 0; c < n_columns; c++) {
        width[c] = strlen(columns[c].title);
        for (size_t r = 0; r < n; r++) {
            char* text = report_text(columns[c].key, json_object_get(json_array_get(rows, r), columns[c].key));
            cells[r * (size_t)n_columns + (size_t)c] = text;
            width[c] = strlen(text) > width[c] ? strlen(text) : width[c];
        }
        all += width[c] + 2;
    }
    size_t room = (size_t)report_width();
    if (all > room) { width[0] = width[0] + room > all + 20 ? width[0] + room - all : 20; }
    printf("\n");
    for (int c = 0; c < n_columns; c++) {
        report_cell_(columns[c].title, width[c], columns[c].to_the_right, c == n_columns - 1);
    }
    printf("\n");
    for (size_t i = 0; i < n * (size_t)n_columns; i++) {
        int c = (int)(i % (size_t)n_columns);
        if (c == 0) { report_shorten_(cells[i], width[0]); }
        report_cell_(cells[i], width[c], columns[c].to_the_right, c == n_columns - 1);
        if (c == n_columns - 1) { printf("\n"); }
        free(cells[i]);
    }
    free(cells);
}
#endif  // TOOLS_REPORT_H
