/*
Options: a trainer describes each on one line of a table, and from that line come the parser, --help, the settings
printout, the nearest name for a wrong one, and the settings kept in a checkpoint.
    struct { int batch_size, schedule; float lr; const char* train; } o;
    Option table[] = {
        {"data", "batch-size", "-b", OPTION_INT, &o.batch_size, "4", 1, 65536, "N", "rows per micro-batch", 0},
        {"data", "train", "-i --input", OPTION_TEXT, &o.train, "", 0, 0, "PATH", "token shards to train on", 0},
        {"optimizer", "lr", "", OPTION_FLOAT, &o.lr, "3e-4", 0, 10, "F", "peak learning rate", 0},
        {"optimizer", "schedule", "", OPTION_CHOICE, &o.schedule, "wsd", 0, 0, "linear|cosine|wsd", "how it falls", 0},
    };
    options_parse(table, 4, argc, argv, "trains GPT-2");
On the command line: --name value, --name=value, and the same with every alias; a switch stands alone or takes 0 or 1;
a text may be "-", but one that starts with "--" or is itself an option needs the "=". --help prints the table.
--args FILE reads lines `name = value` (dashes in front allowed; a switch may stand alone; "#" at the start of a line or
after a blank begins a comment). A later value wins. Nothing else is accepted: no short forms, and words that are no
options only by options_parse_words, for tools that take files; a switch then takes the next word only if it is 0 or 1.
Numbers are read to their end: an integer is a sign and digits, a float is what strtof makes of digits, sign, point and
exponent, finite, and 0 of a 0 alone. Both lie in low..high; an end at or past INT_MIN, INT_MAX or FLT_MAX means "no
limit" there.
An amount is an integer, or a share of a total that the program knows later, as a percentage: 100 or 2%.
A choice becomes the position of its name in the list (choice.h), which is the order of an enum; where the default is
"", it may also be none of them, -1. Texts are heap copies owned by the table until options_free; a program changes one
with options_set.
What an option names outside the program (a file that is read, a folder that is written) stands in the last column of
its row, OPTION_READS and its neighbours: no code guesses it from a name.
Errors: status 2 and one line, `train_gpt2: --batch-size: expected an integer 1..65536, found "4x"`; from a file with
`conf.txt:3: ` in front; an option that other trainers have is refused with their names. Of the ranks that
dev/tools/launch or torchrun starts on a machine the first says it, or prints --help.
*/
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H
#include "choice.h"  // choice_find, choice_name
#include "fail.h"    // fail_input, fail_run, string_copy
#include "print.h"   // box_line, box_row, format_float, format_text, ShortText
#include <assert.h>
#include <float.h>
#include <jansson.h>
#include <ctype.h>
#include <limits.h>
#include <math.h>

#ifndef COMMIT
#define COMMIT "unknown"  // the Makefile passes both
#endif
#ifndef FLAGS
#define FLAGS "unknown"
#endif

typedef enum { OPTION_SWITCH, OPTION_INT, OPTION_FLOAT, OPTION_TEXT, OPTION_CHOICE, OPTION_AMOUNT } OptionType;

// n things, or where percent is above 0 that share of them all; amount_of makes a number of either
typedef struct {
    int n;
    float percent;  // below 100
} Amount;

// What a text names outside the program and what an option asks for, or'ed. By it inputs are compared with outputs, and
// paths that come back from a checkpoint are looked for where its run was started
enum {
    OPTION_READS = 1,        // a path; or, where `takes` is a list such as bytes|PATH, one of the words before
    OPTION_LIST = 2,         // several of them in one text (filelist.h)
    OPTION_FOLDER = 4,       // a folder, not a file
    OPTION_TRAINS = 8,       // training data
    OPTION_VALIDATES = 16,   // validation data
    OPTION_WRITES = 32,      // a path
    OPTION_WORK = 64,        // it gives the program something to do, each time anew
    OPTION_BEGINS = 128,     // a run begins with it, and cannot take another value on the way
    OPTION_TYPED = 256,      // the parser's: by the user, or by --args
    OPTION_RESTORED = 512    // and from a checkpoint
};

enum { MAX_OPTIONS = 128 };  // room for the rows of a trainer

typedef struct {
    const char* group;    // "model", "data", ...: heading of --help, under which all rows of the group are listed
    const char* name;     // "batch-size", typed as --batch-size
    const char* aliases;  // other spellings as typed, separated by blanks: "-b --val-every"; "" for none
    OptionType type;
    void* value;          // int* for switch, int and choice, float* for float, const char** for text, Amount*
    const char* start;    // default, parsed as if typed: "4"; "" for no text and no choice
    double low, high;     // allowed range of int, float and the integer of an amount
    const char* takes;    // what help shows for the value: "N", "PATH"; the list of a choice, "linear|wsd"; or ""
    const char* meaning;  // one line
    int flags;            // OPTION_READS ...: what it names, 0: nothing outside the program
} Option;

// appends rows to the n of a table with room for MAX_OPTIONS; returns how many there are now
static inline int options_append(Option* table, int n, const Option* rows, int n_rows) {
    assert(n + n_rows <= MAX_OPTIONS);
    memcpy(table + n, rows, sizeof *rows * (size_t)n_rows);
    return n + n_rows;
}

// ---- values: from text and to text ----

// what the option takes, for messages: "an integer 1..65536", "a number, 0 or more", "constant|linear"
// is_huge: the value is beyond what an int can be, which is a bound for every integer
static inline ShortText option_expected_(const Option* o, int is_huge) {
    ShortText out;
    int is_int = o->type == OPTION_INT;
    const char* kind = is_int ? "an integer" : "a number";
    int has_low = o->low > (is_int ? (double)INT_MIN : -(double)FLT_MAX);
    int has_high = (is_int && is_huge) || o->high < (is_int ? (double)INT_MAX : (double)FLT_MAX);
    if (o->type == OPTION_SWITCH) { snprintf(out.s, sizeof out.s, "0 or 1"); }
    else if (o->type == OPTION_TEXT || o->type == OPTION_CHOICE) { snprintf(out.s, sizeof out.s, "%s", o->takes); }
    else if (o->type == OPTION_AMOUNT) {
        snprintf(out.s, sizeof out.s, "an integer, %.10g or more, or a percentage below 100%%", o->low);
    }
    else if (has_low && has_high) { snprintf(out.s, sizeof out.s, "%s %.10g..%.10g", kind, o->low, o->high); }
    else if (has_low) { snprintf(out.s, sizeof out.s, "%s, %.10g or more", kind, o->low); }
    else if (has_high) { snprintf(out.s, sizeof out.s, "%s, at most %.10g", kind, o->high); }
    else { snprintf(out.s, sizeof out.s, "%s", kind); }
    return out;
}

// is `word` one of the spellings in `list` ("-b --val-every")?
static inline int option_in_list(const char* list, const char* word, size_t length) {
    while (*list) {
        size_t n = strcspn(list, " ");
        if (n == length && strncmp(list, word, n) == 0) { return 1; }
        list += n + (list[n] != '\0');
    }
    return 0;
}

static inline int option_parse_switch_(const Option* o, const char* text) {
    if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0) { return 0; }
    *(int*)o->value = text[0] == '1';
    return 1;
}

static inline int option_parse_choice_(const Option* o, const char* text) {
    const int value = choice_find(o->takes, text), may_be_none = !*o->start && !*text;
    if (value < 0 && !may_be_none) { return 0; }
    *(int*)o->value = value;
    return 1;
}

// any text will do that is UTF-8: settings are kept as JSON, which holds nothing else
static inline void option_take_text_(const Option* o, const char* text, const char* where) {
    json_t* as_json = json_string(text);
    if (!as_json) { fail_input("%s--%s: expected UTF-8, found \"%s\"", where, o->name, format_text(text).s); }
    json_decref(as_json);
    char* copy = string_copy(text);  // before the free: `text` may be the old value
    free(*(char**)o->value);
    *(const char**)o->value = copy;
}

// does a number that is not 0 become 0 as a float?
static inline int option_underflows_(const char* text) {
    char* end;
    const int is_zero = strtof(text, &end) == 0.0f && end > text && *end == '\0';
    return is_zero && isdigit((unsigned char)text[strcspn(text, "123456789eE")]);
}

// the whole of `text` as the option's number, inside its range; nothing is stored when that fails
static inline int option_parse_number_(const Option* o, const char* text) {
    char* end;
    // strtol and strtof would also take blanks in front, hexadecimal, inf and nan
    size_t n_allowed = strspn(text, o->type == OPTION_FLOAT ? "+-.0123456789eE" : "+-0123456789");
    if (n_allowed == 0 || text[n_allowed]) { return 0; }
    errno = 0;
    if (o->type == OPTION_FLOAT) {
        float x = strtof(text, &end);
        if (*end || !isfinite(x) || x < (float)o->low || x > (float)o->high) { return 0; }  // (float): 0.1f > 0.1
        if (option_underflows_(text)) { return 0; }
        *(float*)o->value = x;
    } else {
        long x = strtol(text, &end, 10);
        if (*end || errno || x < INT_MIN || x > INT_MAX || (double)x < o->low || (double)x > o->high) { return 0; }
        *(int*)o->value = (int)x;
    }
    return 1;
}

// "100" or "2.5%"
static inline int option_parse_amount_(const Option* o, const char* text) {
    Amount amount = {0, 0.0f};
    Option part = *o;  // the number that it begins with
    char digits[64];
    const size_t length = strlen(text);
    if (length == 0 || length >= sizeof digits) { return 0; }
    memcpy(digits, text, length + 1);
    if (text[length - 1] == '%') {
        digits[length - 1] = '\0';
        part.type = OPTION_FLOAT;
        part.value = &amount.percent;
        part.low = 0.0;
        part.high = FLT_MAX;
    } else {
        part.type = OPTION_INT;
        part.value = &amount.n;
    }
    if (!option_parse_number_(&part, digits) || amount.percent >= 100.0f) { return 0; }
    *(Amount*)o->value = amount;
    return 1;
}

// of `total` things: the number itself, or the share, rounded down
static inline int amount_of(Amount amount, int total) {
    const double percent = strtod(format_float(amount.percent).s, NULL);  // 0.7 as it was typed, not the float of it
    return percent > 0.0 ? (int)(percent * total / 100.0) : amount.n;
}

// `where` is "" or names the file and line the text came from: "conf.txt:3: "
static inline void option_store_(const Option* o, const char* text, const char* where) {
    int ok = 1;
    if (o->type == OPTION_TEXT) { option_take_text_(o, text, where); }
    else if (o->type == OPTION_SWITCH) { ok = option_parse_switch_(o, text); }
    else if (o->type == OPTION_CHOICE) { ok = option_parse_choice_(o, text); }
    else if (o->type == OPTION_AMOUNT) { ok = option_parse_amount_(o, text); }
    else { ok = option_parse_number_(o, text); }
    if (!ok && o->type == OPTION_FLOAT && option_underflows_(text)) {
        fail_input("%s--%s: expected 0, or a number that is not 0 as a float, found \"%s\"", where, o->name,
                   format_text(text).s);
    }
    if (!ok) {
        const ShortText expected = option_expected_(o, strtod(text, NULL) > INT_MAX);
        fail_input("%s--%s: expected %s, found \"%s\"", where, o->name, expected.s, format_text(text).s);
    }
}

// the value as a heap text that option_store_ would read back to the same bits
static inline char* option_text_(const Option* o) {
    if (o->type == OPTION_TEXT) { return string_copy(*(const char**)o->value); }
    if (o->type == OPTION_CHOICE) { return string_copy(choice_name(o->takes, *(int*)o->value).s); }
    if (o->type == OPTION_FLOAT) { return string_copy(format_float(*(float*)o->value).s); }
    ShortText digits;
    const Amount* amount = o->type == OPTION_AMOUNT ? (const Amount*)o->value : NULL;
    if (amount && amount->percent > 0.0f) {
        digits = format_float(amount->percent);
        strcat(digits.s, "%");
    } else { snprintf(digits.s, sizeof digits.s, "%d", *(int*)o->value); }
    return string_copy(digits.s);
}

static inline int option_is_default_(const Option* o) {
    union { int as_int; float as_float; char* as_text; Amount as_amount; } start;
    Option parsed = *o;
    memset(&start, 0, sizeof start);
    parsed.value = &start;
    option_store_(&parsed, o->start, "");
    const size_t n_bytes = o->type == OPTION_AMOUNT ? sizeof(Amount) : sizeof(int);
    if (o->type != OPTION_TEXT) { return memcmp(&start, o->value, n_bytes) == 0; }
    int same = strcmp(start.as_text, *(const char**)o->value) == 0;
    free(start.as_text);
    return same;
}

// ---- names ----

// the row with this spelling ("--batch-size", "-b"), or -1
static inline int options_find_(const Option* table, int n, const char* word, size_t length) {
    for (int i = 0; i < n; i++) {
        int is_long = length > 2 && strncmp(word, "--", 2) == 0;
        if (is_long && option_in_list(table[i].name, word + 2, length - 2)) { return i; }
        if (option_in_list(table[i].aliases, word, length)) { return i; }
    }
    return -1;
}

// Levenshtein: how many letters to insert, delete or change to turn a into b. row[j] is the answer for the first i
// letters of a and the first j of b; each i overwrites the row of i-1, of which `diagonal` keeps the one value needed.
static inline int option_edits_(const char* a, size_t length_a, const char* b, size_t length_b) {
    int row[64];
    assert(length_b < 64);
    for (size_t j = 0; j <= length_b; j++) { row[j] = (int)j; }
    for (size_t i = 1; i <= length_a; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= length_b; j++) {
            int change = diagonal + (a[i - 1] != b[j - 1]);
            int other = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = change < other ? change : other;
        }
    }
    return row[length_b];
}

// the long spelling nearest to a wrong one, or "" if none is near; a beginning ("--batch") is as near as one edit
static inline ShortText options_nearest_(const Option* table, int n, const char* word, size_t length) {
    ShortText best = {""};
    int fewest = length < 6 ? (int)length / 2 : 3;  // three wrong letters, or half of a short word: it was another one
    for (int i = 0; i <= n; i++) {
        char spellings[512] = "--help --args", *rest = NULL;
        if (i < n) { snprintf(spellings, sizeof spellings, "--%s %s", table[i].name, table[i].aliases); }
        for (char* s = strtok_r(spellings, " ", &rest); s; s = strtok_r(NULL, " ", &rest)) {
            int edits = length > 3 && strncmp(s, word, length) == 0 ? 1 : option_edits_(word, length, s, strlen(s));
            if (edits < fewest && s[1] == '-') {
                fewest = edits;
                snprintf(best.s, sizeof best.s, "%s", s);
            }
        }
    }
    return best;
}

// Which programs have an option that this one lacks, "train_a and train_b"; NULL: none that is known. A program of
// several that share their pages says it here (run/other_trainers.h)
typedef const char* (*OptionsOfOthers)(const char* word, size_t length);
static inline OptionsOfOthers* options_of_others(void) {
    static OptionsOfOthers find = NULL;
    return &find;
}

static inline Option* options_row_(Option* table, int n, const char* word, size_t length, const char* where) {
    int i = options_find_(table, n, word, length);
    if (i >= 0) { return &table[i]; }
    const OptionsOfOthers find = *options_of_others();
    const char* others = find ? find(word, length) : NULL;
    ShortText typed, nearest = options_nearest_(table, n, word, length);
    snprintf(typed.s, sizeof typed.s, "%.*s", length < 100 ? (int)length : 100, word);
    if (others) { fail_input("%s%s: expected an option of this program, found one of %s", where, typed.s, others); }
    if (!nearest.s[0]) { fail_input("%s%s: unknown option (--help lists all)", where, format_text(typed.s).s); }
    fail_input("%s%s: unknown option, did you mean %s? (--help lists all)", where, format_text(typed.s).s, nearest.s);
}

// the path, or paths, that the option names in one of these ways (OPTION_READS | OPTION_WRITES); "" where it names none
static inline const char* option_path(const Option* o, int ways) {
    if (o->type != OPTION_TEXT || !(o->flags & ways)) { return ""; }
    const char *text = *(const char**)o->value, *last = strrchr(o->takes, '|');  // bytes|PATH: bytes is no path
    const int is_word = last && choice_find(o->takes, text) >= 0 && strcasecmp(text, last + 1) != 0;
    return is_word ? "" : text;
}

// the row named `name` in our own code; NULL: this trainer has none
static inline Option* options_at(const Option* table, int n, const char* name) {
    for (int i = 0; i < n; i++) {
        if (strcmp(table[i].name, name) == 0) { return (Option*)&table[i]; }
    }
    return NULL;
}

static inline Option* options_named_(const Option* table, int n, const char* name) {
    Option* row = options_at(table, n, name);
    if (!row) { fail_run("options: no row is named %s", name); }
    return row;
}

// ---- --help ----

// words into the columns from..99, or to the edge of a narrower terminal; the cursor stands at `column`
static inline void options_wrap_(const char* text, int from, int column) {
    const int terminal = terminal_columns(), end = terminal > 0 && terminal < 100 ? terminal : 100;
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > from && column + 1 + length > end) { column = printf("\n%*s", from, "") - 1; }
        else if (column > from) { column += printf(" "); }
        column += printf("%.*s", length, text);
        text += length + (text[length] != '\0');
    }
    printf("\n");
}

static inline void options_help_row_(const char* name, const char* takes, const char* meaning) {
    const int from = 28;
    int column = printf("  --%s%s%s", name, *takes ? " " : "", takes);
    column = column + 2 > from ? printf("\n%*s", from, "") - 1 : column + printf("%*s", from - column, "");
    options_wrap_(meaning, from, column);
}

// words on the command line that are no options and no values of options: FILE...
typedef struct {
    const char* takes;   // what the first line of --help shows: "[FILE]..."
    const char** words;  // room for argc of them; they are the caller's
    int n;
} OptionWords;

static inline void options_help_option_(const Option* o) {
    char text[2048];
    int used = snprintf(text, sizeof text, "%s", o->meaning);
    if (*o->start || *o->aliases) {
        snprintf(text + used, sizeof text - (size_t)used, " (%s%s%s%s%s)", *o->start ? "default " : "", o->start,
                 *o->start && *o->aliases ? "; " : "", *o->aliases ? "also " : "", o->aliases);
    }
    options_help_row_(o->name, o->takes, text);
}

static inline int options_group_begins_(const Option* table, int i) {
    int before = 0;
    for (int k = 0; k < i; k++) { before += strcmp(table[k].group, table[i].group) == 0; }
    return before == 0;
}

// group by group, in the order in which the groups begin: a trainer's own rows join those that all trainers have
static inline void options_help_(const Option* table, int n, const OptionWords* words, const char* about) {
    printf("usage: %s [--name value | --name=value]...%s%s\n", program_invocation_short_name, words ? " " : "",
           words ? words->takes : "");
    options_wrap_(about, 0, 0);
    printf("\nWhere 0|1 is taken, --name alone is --name 1.\n");
    for (int i = 0; i < n; i++) {
        if (!options_group_begins_(table, i)) { continue; }
        printf("\n%s\n", table[i].group);
        for (int k = i; k < n; k++) {
            if (strcmp(table[k].group, table[i].group) == 0) { options_help_option_(&table[k]); }
        }
    }
    printf("\nhelp\n");
    options_help_row_("args", "FILE", "read options from a file: a line `name = value` for each, # begins a comment");
    options_help_row_("version", "", "print of which commit this is, and how it was compiled");
    options_help_row_("help", "", "print this and stop");
    if (fflush(stdout) != 0) { fail_run("standard output: %s", strerror(errno)); }
}

// ---- parsing ----

// how: OPTION_TYPED, OPTION_RESTORED or 0
static inline void option_mark_(Option* o, int how) { o->flags = (o->flags & ~(OPTION_TYPED | OPTION_RESTORED)) | how; }

// value NULL: none was typed, which only a switch allows
static inline void option_give_(Option* o, const char* value, const char* where) {
    if (!value && o->type != OPTION_SWITCH) {
        fail_input("%s--%s: expected %s, found nothing", where, o->name, option_expected_(o, 0).s);
    }
    option_store_(o, value ? value : "1", where);
    option_mark_(o, OPTION_TYPED);
}

// `text` without the blanks around it; cuts in place
static inline char* option_trim_(char* text) {
    const char* blanks = " \t\r\v\f";
    text += strspn(text, blanks);
    size_t n = strlen(text);
    while (n > 0 && strchr(blanks, text[n - 1])) { n--; }
    text[n] = '\0';
    return text;
}

static inline void options_read_line_(Option* table, int n, char* line, const char* where) {
    for (char* c = line; *c; c++) {
        if (*c == '#' && (c == line || c[-1] == ' ' || c[-1] == '\t')) { *c = '\0'; break; }
    }
    char* value = strchr(line, '=');
    if (value) {
        *value = '\0';
        value = option_trim_(value + 1);
    }
    char* name = option_trim_(line);
    if (!*name && !value) { return; }
    if (!*name || strpbrk(name, " \t")) {
        fail_input("%sexpected name = value, found \"%s\"", where, format_text(name).s);
    }
    char spelling[4096 + 2];
    snprintf(spelling, sizeof spelling, "%s%s", *name == '-' ? "" : "--", name);
    option_give_(options_row_(table, n, spelling, strlen(spelling), where), value, where);
}

static inline void options_read_file_(Option* table, int n, const char* path) {
    char shown[4096], where[4096 + 32], line[4096];
    snprintf(shown, sizeof shown, "%s", path);
    plain_text(shown);
    FILE* file = fopen(path, "r");
    if (!file) { fail_input("--args: %s: %s", shown, strerror(errno)); }
    int c = '\n';
    for (int number = 1; c != EOF; number++) {
        size_t used = 0;
        while ((c = getc(file)) != EOF && c != '\n') {
            if (c == '\0' || used == sizeof line - 1) {
                fail_input("%s:%d: expected text in lines of less than %zu bytes", shown, number, sizeof line);
            }
            line[used++] = (char)c;
        }
        line[used] = '\0';
        snprintf(where, sizeof where, "%s:%d: ", shown, number);
        options_read_line_(table, n, line, where);
    }
    if (ferror(file)) { fail_input("--args: %s: %s", shown, strerror(errno)); }
    fclose(file);
}

// can `word`, which follows the option on the command line, be its value?
static inline int option_accepts_(const Option* table, int n, const Option* o, const char* word,
                                  const OptionWords* words) {
    if (o->type == OPTION_SWITCH && words) { return strcmp(word, "0") == 0 || strcmp(word, "1") == 0; }
    if (o->type == OPTION_SWITCH) { return word[0] != '-'; }  // a word without dashes could be nothing else
    return strncmp(word, "--", 2) != 0 && options_find_(table, n, word, strcspn(word, "=")) < 0;
}

static inline void options_defaults_(Option* table, int n) {
    for (int i = 0; i < n; i++) {
        Option* o = &table[i];
        if (o->type == OPTION_TEXT) { *(const char**)o->value = NULL; }
        option_store_(o, o->start, "default of ");
        option_mark_(o, 0);
        char spellings[512], *rest = NULL;
        snprintf(spellings, sizeof spellings, "--%s %s", o->name, o->aliases);
        for (char* s = strtok_r(spellings, " ", &rest); s; s = strtok_r(NULL, " ", &rest)) {
            assert(options_find_(table, n, s, strlen(s)) == i);  // no spelling twice
        }
    }
}

// A word where an option belongs; `before` took the word before it, or is NULL. Of a pattern without quotes the shell
// makes many words, of which the option has taken the first.
__attribute__((noreturn))
static inline void options_refuse_word_(const char* word, const Option* before) {
    if (before && before->type == OPTION_TEXT && access(word, F_OK) == 0) {
        char list[128] = "";
        if (before->flags & OPTION_LIST) {
            snprintf(list, sizeof list, ", or a comma between two files (--%s a,b)", before->name);
        }
        fail_input("expected an option such as --name value, found \"%s\", a second file after --%s: put a pattern in "
                   "quotes (--%s '*.txt'), so that the shell leaves it alone%s", format_text(word).s, before->name,
                   before->name, list);
    }
    fail_input("expected an option such as --name value, found \"%s\" (--help lists all)", format_text(word).s);
}

// exits with 2 on a wrong option and with 0 after --help; words NULL: there may be none
static inline void options_parse_words(Option* table, int n, OptionWords* words, int argc, char** argv,
                                       const char* about) {
    const Option* before = NULL;  // whose value was the last word
    options_defaults_(table, n);
    if (words) { words->n = 0; }
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *next = i + 1 < argc ? argv[i + 1] : NULL;
        size_t length = strcspn(word, "=");
        const char* value = word[length] ? word + length + 1 : NULL;
        if (strcmp(word, "--help") == 0 || (strcmp(word, "-h") == 0 && options_find_(table, n, "-h", 2) < 0)) {
            if (!failure_()->silent) { options_help_(table, n, words, about); }
            exit(0);
        }
        if (strcmp(word, "--version") == 0) {
            if (!failure_()->silent) { printf("%s %s, %s\n", program_invocation_short_name, COMMIT, FLAGS); }
            if (fflush(stdout) != 0) { fail_run("standard output: %s", strerror(errno)); }
            exit(0);
        }
        if (length == 6 && strncmp(word, "--args", 6) == 0) {
            if (!value && !next) { fail_input("--args: expected FILE, found nothing"); }
            options_read_file_(table, n, value ? value : argv[++i]);
            continue;
        }
        if (word[0] != '-' && words) {
            words->words[words->n++] = word;
            continue;
        }
        if (word[0] != '-') { options_refuse_word_(word, before); }
        Option* o = options_row_(table, n, word, length, "");
        if (!value && next && option_accepts_(table, n, o, next, words)) {
            value = next;
            i++;
        } else if (!value && next && o->type != OPTION_SWITCH) {
            fail_input("--%s: expected %s, found the option %s (as a value: --%s=%s)", o->name,
                       option_expected_(o, 0).s,
                       format_text(next).s, o->name, format_text(next).s);
        }
        option_give_(o, value, "");
        before = o;
    }
}

// torchrun gives all ranks of a machine the same words, dev/tools/launch those of all machines: the first alone says
// what is wrong with them, or helps
static inline int options_of_later_rank(void) {
    const char* id = getenv("TORCHELASTIC_RUN_ID");
    const char* rank = getenv(id && strncmp(id, "launch-", 7) == 0 ? "RANK" : "LOCAL_RANK");
    return rank && strcmp(rank, "0") != 0 && id && *id;
}

static inline void options_parse(Option* table, int n, int argc, char** argv, const char* about) {
    failure_()->silent = options_of_later_rank();
    options_parse_words(table, n, NULL, argc, argv, about);
    failure_()->silent = 0;
}

// the file of the k-th --args on the command line; NULL: there are no more
static inline const char* options_args_file(int argc, char** argv, int k) {
    for (int i = 1; i < argc; i++) {
        const char* value = strncmp(argv[i], "--args=", 7) == 0 ? argv[i] + 7
                          : strcmp(argv[i], "--args") == 0      ? argv[i + 1]
                                                                : NULL;
        if (value && k-- == 0) { return value; }
    }
    return NULL;
}

static inline void options_free(Option* table, int n) {
    for (int i = 0; i < n; i++) {
        if (table[i].type != OPTION_TEXT) { continue; }
        free(*(void**)table[i].value);
        *(const char**)table[i].value = NULL;
    }
}

// ---- what a trainer asks and does afterwards ----

// 0: the default holds, 1: typed, 2: restored from a checkpoint
static inline int options_given(const Option* table, int n, const char* name) {
    const int flags = options_named_(table, n, name)->flags;
    return flags & OPTION_TYPED ? 1 : flags & OPTION_RESTORED ? 2 : 0;
}

// a value that the program settles itself (the name of the run folder), checked like a typed one; for options_given
// nothing changes
static inline void options_set(Option* table, int n, const char* name, const char* text) {
    option_store_(options_named_(table, n, name), text, "");
}

// gives --help what an option that trainers share means to this one
static inline void options_reword(Option* table, int n, const char* name, const char* meaning) {
    options_named_(table, n, name)->meaning = meaning;
}

// ends with status 2, where only the trainer can check:
__attribute__((noreturn, format(printf, 2, 3)))
static inline void options_fail(const char* name, const char* format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fail_input("--%s: %s", name, text);
}

// for lists of what may not stand together, a line for each
static inline void options_refuse(int is_wrong, const char* name, const char* why) {
    if (is_wrong) { options_fail(name, "%s", why); }
}

// the settings box: what is not the default; --help and settings.json have the rest
static inline void options_print(const Option* table, int n) {
    box_line();
    for (int i = 0; i < n; i++) {
        if (option_is_default_(&table[i])) { continue; }
        char* text = option_text_(&table[i]);
        box_row(table[i].name, "%s", text);
        free(text);
    }
}

// ---- settings in a checkpoint ----

// {"batch-size": 4, "lr": 0.0003, "shuffle": true, "train": "..."}; a float is the double of its shortest decimal, so
// that it reads well (dumped with JSON_REAL_PRECISION(9)) and, cast to float, is the same float
static inline json_t* options_to_json(const Option* table, int n) {
    json_t* settings = json_object();
    for (int i = 0; i < n; i++) {
        const Option* o = &table[i];
        json_t* value = NULL;
        if (o->type == OPTION_SWITCH) { value = json_boolean(*(int*)o->value); }
        else if (o->type == OPTION_INT || (o->type == OPTION_AMOUNT && ((Amount*)o->value)->percent == 0.0f)) {
            value = json_integer(*(int*)o->value);
        }
        else if (o->type == OPTION_FLOAT) {
            value = json_real(shortest_double(*(float*)o->value));
        }
        else if (o->type == OPTION_CHOICE) { value = json_string(choice_name(o->takes, *(int*)o->value).s); }
        else if (o->type == OPTION_AMOUNT) {
            char* text = option_text_(o);
            value = json_string(text);
            free(text);
        }
        else { value = json_string(*(const char**)o->value); }
        if (json_object_set_new(settings, o->name, value) != 0) { fail_run("--%s: cannot be kept as JSON", o->name); }
    }
    return settings;
}

// Resume: options that were not typed take the stored values; keys without a row, another version's, are ignored. What
// asks for work, or says where to write outside the run's folder, is not restored: it is asked for each time
static inline void options_from_json(Option* table, int n, const json_t* settings) {
    const char* where = "settings of the checkpoint: ";
    for (int i = 0; i < n; i++) {
        Option* o = &table[i];
        const json_t* value = json_object_get(settings, o->name);
        if (!value || o->flags & (OPTION_TYPED | OPTION_WRITES | OPTION_WORK)) { continue; }
        char* text = json_is_string(value) ? string_copy(json_string_value(value))
                   : json_is_boolean(value) ? string_copy(json_is_true(value) ? "1" : "0")
                   : json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
        if (!text) { fail_run("%s--%s: no memory", where, o->name); }
        if (o->type == OPTION_TEXT && !json_is_string(value)) {
            fail_input("%s--%s: expected a text, found %s", where, o->name, format_text(text).s);
        }
        option_store_(o, text, where);
        option_mark_(o, OPTION_RESTORED);
        free(text);
    }
}
#endif  // LLMC_OPTIONS_H
