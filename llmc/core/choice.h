/*
A choice is a value of an enum and, for people and files, a name in a list: the names stand in the order of the enum.
    #define SHAPE_NAMES "round|square,quadratic|flat"
    typedef enum { SHAPE_ROUND, SHAPE_SQUARE, SHAPE_FLAT } Shape;
    choice_find(SHAPE_NAMES, "square")         SHAPE_SQUARE, as of "quadratic", its other spelling, and of "Square"
    choice_name(SHAPE_NAMES, SHAPE_SQUARE).s   "square"
    choice_or(SHAPE_NAMES).s                   "round, square or flat", for messages
The list is also what an option of type OPTION_CHOICE takes (options.h).
*/
#ifndef LLMC_CHOICE_H
#define LLMC_CHOICE_H
#include "print.h"  // ShortText
#include <assert.h>
#include <string.h>
#include <strings.h>

// the value with this name, in upper or lower case, or -1: no value has it
static inline int choice_find(const char* list, const char* name) {
    const size_t n_name = strlen(name);
    for (int value = 0; *list;) {
        const size_t n = strcspn(list, "|,");
        if (n == n_name && strncasecmp(list, name, n) == 0) { return value; }
        value += list[n] == '|';
        list += n + (list[n] != '\0');
    }
    return -1;
}

// the name of a value, "" of -1
static inline ShortText choice_name(const char* list, int value) {
    ShortText name = {""};
    for (int k = 0; k < value; k++) {
        list = strchr(list, '|');
        assert(list);  // the enum has a value that the list lacks
        list++;
    }
    if (value >= 0) { snprintf(name.s, sizeof name.s, "%.*s", (int)strcspn(list, "|,"), list); }
    return name;
}

typedef struct { char s[256]; } ChoiceText;

static inline ChoiceText choice_or(const char* list) {
    ChoiceText all = {""};
    for (size_t n = 0; *list && n < sizeof all.s; list += *list == '|') {
        const size_t width = strcspn(list, "|,"), end = strcspn(list, "|");
        const char* after = !list[end] ? "" : strchr(list + end + 1, '|') ? ", " : " or ";
        n += (size_t)snprintf(all.s + n, sizeof all.s - n, "%.*s%s", (int)width, list, after);
        list += end;
    }
    return all;
}
#endif  // LLMC_CHOICE_H
