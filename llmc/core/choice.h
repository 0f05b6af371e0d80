/*
A choice is a value of an enum and, for people and files, a name in a list: the names stand in the order of the enum.
    #define SHAPE_NAMES "round|square,quadratic|flat"
    typedef enum { SHAPE_ROUND, SHAPE_SQUARE, SHAPE_FLAT } Shape;
    choice_find(SHAPE_NAMES, "square")         SHAPE_SQUARE, as of "quadratic", its other spelling, and of "Square"
    choice_name(SHAPE_NAMES, SHAPE_SQUARE).s   "square"
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
#endif  // LLMC_CHOICE_H
