/*
Where a text is cut into words before byte-pair encoding works on each of them.
    word_end_gpt2   GPT-2's regular expression, as a matcher
    word_end_chat   that of Qwen2, 2.5 and 3, Qwen3.5 and 3.6, Llama 3 and GPT-4: they differ in what a letter is and in
                    how many digits stand together
    Splitter        one of them, or any other expression with PCRE2
A matcher is given valid UTF-8 and the place where a word begins, and returns where it ends. At every place one of the
alternatives matches, so words cover the text. In the expressions the alternatives are tried in their order:
    GPT-2   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    Qwen2   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|
            ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
    Qwen3.5 the same with [\p{L}\p{M}] for letters: a combining mark belongs to its letter
    Llama 3 the same as Qwen2 with \p{N}{1,3}
Other expressions: PCRE2 understands them, but \s, \S are rewritten (its \s has U+180E, Oniguruma's, which the files
were made with, has not), and what means something else to the two is refused. Letters newer than the installed PCRE2
(10.42: Unicode 14) are no letters to it.
Cost:   every character is looked at three times at most. About 300 MB/s of English.
Limits of other expressions, for a file may hold one that needs quadratic or exponential time. Runs of any length of one
letter, of blanks, of line ends must pass, as must gigabytes of text; DeepSeek's and o200k's take 0.02 to 0.1 us a byte
of prose and of such runs, 0.4 where PCRE2 has no compiler for this processor:
    time     2 s and 5 us a byte of CPU time for a text, twelve times the slowest of these (timelimit.h)
    steps    of one match 10 million, PCRE2's own default, and 4 a byte, for a run of capitals goes back over all of it
    memory   256 MiB, of PCRE2's 20 GB, where a group repeats more often than its 32 KiB of stack hold: a million times
Errors: fail_input when one is passed, with the text's length; ids never depend on them.
*/
#ifndef LLMC_PRETOKENIZE_H
#define LLMC_PRETOKENIZE_H
#include "../core/mapfile.h"    // ErrorText, error_set
#include "../core/timelimit.h"  // TimeLimit
#include "unicode.h"            // Unicode, UNICODE_LETTER, utf8_next, utf8_before, ByteBuffer
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

// ---- pieces of the matchers; s is valid UTF-8 of n bytes ----

// flags of the character at `at` < n, and its length
static inline int word_flags_at_(const Unicode* u, const unsigned char* s, size_t at, int* length) {
    uint32_t code;
    *length = utf8_next(s + at, &code);
    return u->flags[code];
}

// the end of a run of characters, at most `most`, that have one of the flags
static inline size_t word_run_end_(const Unicode* u, const unsigned char* s, size_t n, size_t at, int flags,
                                   size_t most) {
    for (int length; most > 0 && at < n && (word_flags_at_(u, s, at, &length) & flags); most--) {
        at += (size_t)length;
    }
    return at;
}

// the end of a run of characters that have none of them
static inline size_t word_run_end_without_(const Unicode* u, const unsigned char* s, size_t n, size_t at, int flags) {
    for (int length; at < n && !(word_flags_at_(u, s, at, &length) & flags);) { at += (size_t)length; }
    return at;
}

// White space from `at`, without the line breaks in it: \s+(?!\S)|\s+. All of it at the end of the text; otherwise its
// last character is left for the word that follows, unless it is the only one.
static inline size_t word_space_end_(const Unicode* u, const unsigned char* s, size_t n, size_t at) {
    size_t end = word_run_end_(u, s, n, at, UNICODE_SPACE, SIZE_MAX);
    if (end == n) { return n; }
    size_t last = utf8_before(s, end);
    return last > at ? last : end;
}

// length of 's 't 're 've 'm 'll 'd at an apostrophe, 0 when there is none. Without case, U+017F (long s) is an s too.
static inline size_t word_contraction_(const unsigned char* s, size_t n, size_t at, int ignore_case) {
    int fold = ignore_case ? 0x20 : 0;
    int a = at + 1 < n ? s[at + 1] | fold : 0, b = at + 2 < n ? s[at + 2] | fold : 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') { return 2; }
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) { return 3; }
    return ignore_case && at + 2 < n && s[at + 1] == 0xc5 && s[at + 2] == 0xbf ? 3 : 0;
}

// ---- the matchers ----

static inline size_t word_end_gpt2(const Unicode* u, const unsigned char* s, size_t n, size_t at) {
    const int other = UNICODE_SPACE | UNICODE_LETTER | UNICODE_NUMBER;
    int length;
    size_t contraction = s[at] == '\'' ? word_contraction_(s, n, at, 0) : 0;
    if (contraction) { return at + contraction; }
    size_t first = s[at] == ' ' && at + 1 < n ? at + 1 : at;  // behind the blank that a word may begin with
    int flags = word_flags_at_(u, s, first, &length);
    if (flags & UNICODE_SPACE) { return word_space_end_(u, s, n, at); }
    if (flags & UNICODE_LETTER) { return word_run_end_(u, s, n, first, UNICODE_LETTER, SIZE_MAX); }
    if (flags & UNICODE_NUMBER) { return word_run_end_(u, s, n, first, UNICODE_NUMBER, SIZE_MAX); }
    return word_run_end_without_(u, s, n, first, other);
}

// letter: UNICODE_LETTER, with UNICODE_MARK for Qwen3.5; n_digits: 1, or 3 for Llama 3
static inline size_t word_end_chat(const Unicode* u, const unsigned char* s, size_t n, size_t at, int letter,
                                   size_t n_digits) {
    const int other = UNICODE_SPACE | letter | UNICODE_NUMBER;
    int length, next_length;
    size_t contraction = s[at] == '\'' ? word_contraction_(s, n, at, 1) : 0;
    if (contraction) { return at + contraction; }
    int flags = word_flags_at_(u, s, at, &length);
    if (flags & letter) { return word_run_end_(u, s, n, at, letter, SIZE_MAX); }
    if (flags & UNICODE_NUMBER) { return word_run_end_(u, s, n, at, UNICODE_NUMBER, n_digits); }
    size_t second = at + (size_t)length;
    int line_break = s[at] == '\r' || s[at] == '\n';
    int next = second < n ? word_flags_at_(u, s, second, &next_length) : UNICODE_SPACE;
    if (!line_break && (next & letter)) { return word_run_end_(u, s, n, second, letter, SIZE_MAX); }
    if (!(flags & UNICODE_SPACE) || (s[at] == ' ' && !(next & other))) {  // ` ?[^\s\p{L}\p{N}]+[\r\n]*`
        size_t end = word_run_end_without_(u, s, n, s[at] == ' ' ? second : at, other);
        while (end < n && (s[end] == '\r' || s[end] == '\n')) { end++; }
        return end;
    }
    size_t end = word_run_end_(u, s, n, at, UNICODE_SPACE, SIZE_MAX), newline = end;
    while (newline > at && s[newline - 1] != '\r' && s[newline - 1] != '\n') { newline--; }
    return newline > at ? newline : word_space_end_(u, s, n, at);
}

// ---- other expressions ----

// The length of what follows a backslash, if it means the same in both dialects, else 0. Of \p only general categories
// do: PCRE2 takes the name of a script for its script extensions. \s and \S are rewritten.
static inline size_t regex_escape_length_(const char* c) {
    if (*c == 'p' || *c == 'P') {  // p{L}, p{Lu}
        size_t n = c[1] == '{' && c[2] && strchr("LMNPSZC", c[2]) ? 3 + (size_t)(islower((unsigned char)c[3]) != 0) : 0;
        return n > 0 && c[n] == '}' ? n + 1 : 0;
    }
    return *c != '\0' && (!isalnum((unsigned char)*c) || strchr("rntdDsS", *c) != NULL);
}

// The characters of a count that begins at c: {2}, {2,}, {2,3}; 0 for a brace that is a letter to both, -1 for a count
// that is another to Oniguruma: {,2} (at most two), {2}? (none or two), {2}+ (once or more often); and to a newer
// PCRE2, one with blanks
static inline int regex_count_length_(const char* c) {
    const int n = (int)strspn(c + 1, "0123456789, "), n_digits = (int)strspn(c + 1, "0123456789");
    if (n == 0) { return 0; }
    const int n_more = c[1 + n_digits] == ',' ? 1 + (int)strspn(c + 2 + n_digits, "0123456789") : 0;
    if (n_digits == 0 || n_digits + n_more != n || c[1 + n] != '}') { return -1; }
    return c[2 + n] == '+' || (c[2 + n] == '?' && n_more == 0) ? -1 : n + 2;
}

// where a regular expression is read
typedef struct {
    const char* class_starts;  // the first character of the class we are in, or NULL
    int depth, fold_depth;     // open groups; those up to the outermost (?i:, that one included, 0: none is open
    char before;               // the character before this one, in small; brackets of groups do not count
} RegexPlace;

// May this character be read without regard to case? To Oniguruma ss is one letter then, too, the German sharp s, and
// so are the ligatures of ff, fi, fl and st, and most of what others fold to several letters is beyond ASCII
static inline const char* regex_refused_fold_(const RegexPlace* at, const char* c) {
    const char *pairs[] = {"ss", "ff", "fi", "fl", "st"}, letter = (char)tolower((unsigned char)*c);
    if ((unsigned char)*c >= 128) { return "a letter beyond ASCII without regard to case"; }
    if (*c == '\\' && (c[1] == 'p' || c[1] == 'P')) { return "a class of Unicode without regard to case"; }
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        const int is_pair = at->before == pairs[i][0] && letter == pairs[i][1];
        if (is_pair) { return "ss, ff, fi, fl or st without regard to case"; }
    }
    return NULL;
}

// what begins at c and means something else in the two dialects, or NULL
static inline const char* regex_refused_(const RegexPlace* at, const char* c) {
    const char* fold = at->fold_depth > 0 ? regex_refused_fold_(at, c) : NULL;
    if (fold) { return fold; }
    if (*c == '\\') { return regex_escape_length_(c + 1) == 0 ? "this escape" : NULL; }
    if (at->class_starts) { return *c == '[' || strncmp(c, "&&", 2) == 0 ? "a class inside a class" : NULL; }
    if (*c == '^' || *c == '$') { return "an anchor"; }
    if (strncmp(c, "(*", 2) == 0) { return "a verb"; }
    if (*c == '{' && regex_count_length_(c) < 0) { return "this count"; }
    int is_group = strncmp(c, "(?", 2) == 0, is_behind = is_group && c[2] == '<' && (c[3] == '=' || c[3] == '!');
    int is_known = is_group && (is_behind || (c[2] && strchr(":=!>", c[2])) || strncmp(c, "(?i:", 4) == 0);
    return is_group && !is_known ? "this kind of group" : NULL;
}

// how many characters after a bracket say what group it opens
static inline size_t regex_group_length_(const char* c) {
    if (strncmp(c, "(?", 2) != 0) { return 1; }
    return c[2] == 'i' || c[2] == '<' ? 4 : 3;
}

// past the `length` characters at c, which are not refused
static inline void regex_pass_(RegexPlace* at, const char* c, size_t length) {
    if (at->class_starts) {
        if (*c == ']' && c > at->class_starts) { at->class_starts = NULL; }
        return;
    }
    const int opens = *c == '(', closes = *c == ')';
    if (*c == '[') { at->class_starts = c + length; }
    if (opens) { at->depth++; }
    if (opens && strncmp(c, "(?i:", 4) == 0 && at->fold_depth == 0) { at->fold_depth = at->depth; }
    if (closes && at->fold_depth == at->depth) { at->fold_depth = 0; }
    if (closes) { at->depth--; }
    if (!opens && !closes) { at->before = (char)tolower((unsigned char)*c); }
}

// Oniguruma's expression in PCRE2's words, so that both mean the same; 0 with the reason for what is not known to
static inline int regex_translate_(ByteBuffer* out, const char* regex, ErrorText* error) {
    // White_Space; the list also inside a class
    const char* spaces =
        "\\x{9}-\\x{d} \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}";
    const char* others =
        "\\x{0}-\\x{8}\\x{e}-\\x{1f}!-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}"
        "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}\\x{3001}-\\x{10ffff}";
    RegexPlace at = {NULL, 0, 0, 0};
    for (const char* c = regex; *c;) {
        const int in_class = at.class_starts != NULL;
        const char* refused = regex_refused_(&at, c);
        if (refused) {
            return error_set(error, "regex: %s at offset %d is not implemented: %.200s", refused, (int)(c - regex),
                             regex);
        }
        size_t length = *c == '\\' ? 1 + regex_escape_length_(c + 1) : 1;
        if (!in_class && *c == '(') { length = regex_group_length_(c); }
        if (!in_class && *c == '[') { length += c[1] == '^'; }
        if (length == 2 && *c == '\\' && (c[1] == 's' || c[1] == 'S')) {
            const char* list = c[1] == 's' ? spaces : others;
            buffer_append(out, "[", !in_class);
            buffer_append(out, list, strlen(list));
            buffer_append(out, "]", !in_class);
        } else {
            buffer_append(out, c, length);
        }
        regex_pass_(&at, c, length);
        c += length;
    }
    return 1;
}

typedef enum { SPLIT_GPT2, SPLIT_CHAT, SPLIT_REGEX } SplitKind;

typedef struct {
    SplitKind kind;
    int letter;         // of word_end_chat
    size_t n_digits;    // of word_end_chat
    pcre2_code* regex;  // of SPLIT_REGEX
} Splitter;

static inline const char* regex_gpt2_(void) {
    return "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
}

static inline int splitter_compile_(Splitter* splitter, const char* regex, ErrorText* error) {
    ByteBuffer text = {NULL, 0, 0};
    int number;
    size_t offset;
    if (!regex_translate_(&text, regex, error)) {
        buffer_free(&text);
        return 0;
    }
    pcre2_compile_context* context = pcre2_compile_context_create(NULL);
    if (context) { pcre2_set_newline(context, PCRE2_NEWLINE_LF); }
    splitter->regex = pcre2_compile(text.bytes, text.n, PCRE2_UTF | PCRE2_UCP, &number, &offset, context);
    pcre2_compile_context_free(context);
    buffer_free(&text);
    if (!splitter->regex) {
        unsigned char why[200] = "";
        pcre2_get_error_message(number, why, sizeof why);
        return error_set(error, "regex: %s: %.200s", (char*)why, regex);
    }
    uint32_t matches_empty = 0;
    pcre2_pattern_info(splitter->regex, PCRE2_INFO_MATCHEMPTY, &matches_empty);
    pcre2_jit_compile(splitter->regex, PCRE2_JIT_COMPLETE);  // where it cannot, the interpreter matches the same
    if (!matches_empty) { return 1; }
    pcre2_code_free(splitter->regex);
    splitter->regex = NULL;
    return error_set(error, "regex: it matches nothing at all, which is not implemented: %.200s", regex);
}

// the four expressions by their text, any other by PCRE2
static inline int splitter_parse_(Splitter* splitter, const char* regex, ErrorText* error) {
    const char *head = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?",
               *tail = " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
               *marks_tail = " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    char qwen2[200], llama3[200], qwen35[200];
    snprintf(qwen2, sizeof qwen2, "%s\\p{L}+|\\p{N}|%s", head, tail);
    snprintf(llama3, sizeof llama3, "%s\\p{L}+|\\p{N}{1,3}|%s", head, tail);
    snprintf(qwen35, sizeof qwen35, "%s[\\p{L}\\p{M}]+|\\p{N}|%s", head, marks_tail);
    memset(splitter, 0, sizeof *splitter);
    splitter->kind = SPLIT_CHAT;
    splitter->letter = UNICODE_LETTER;
    splitter->n_digits = 1;
    if (strcmp(regex, regex_gpt2_()) == 0) { splitter->kind = SPLIT_GPT2; return 1; }
    if (strcmp(regex, qwen2) == 0) { return 1; }
    if (strcmp(regex, llama3) == 0) { splitter->n_digits = 3; return 1; }
    if (strcmp(regex, qwen35) == 0) { splitter->letter |= UNICODE_MARK; return 1; }
    splitter->kind = SPLIT_REGEX;
    return splitter_compile_(splitter, regex, error);
}

// what one caller needs to match expressions, and what it lets them take
typedef struct {
    pcre2_match_data* found;
    pcre2_match_context* limits;
    TimeLimit* time;
} RegexWork;

enum { REGEX_STEPS = 10000000, REGEX_STEPS_A_BYTE = 4, REGEX_HEAP_KIB = 1 << 18 };

static inline void regex_work_init(RegexWork* w) {
    w->found = pcre2_match_data_create(1, NULL);
    w->limits = pcre2_match_context_create(NULL);
    if (!w->found || !w->limits) { fail_run("regex: no memory"); }
    pcre2_set_heap_limit(w->limits, REGEX_HEAP_KIB);
    w->time = time_limit_init();
}

static inline void regex_work_free(RegexWork* w) {
    pcre2_match_data_free(w->found);
    pcre2_match_context_free(w->limits);
    time_limit_free(w->time);
    memset(w, 0, sizeof *w);
}

// before and after a text of n bytes
static inline void regex_begin(const RegexWork* w, size_t n) {
    const double steps = (double)REGEX_STEPS + (double)REGEX_STEPS_A_BYTE * (double)n;
    const double seconds = 2.0 + 5e-6 * (double)n;
    pcre2_set_match_limit(w->limits, steps < UINT32_MAX ? (uint32_t)steps : UINT32_MAX);
    time_limit_begin(w->time, seconds,
                     "the tokenizer's regular expression takes more than %.1f s for a text of %zu bytes: expected "
                     "words that are found in linear time; take the model's own tokenizer.json", seconds, n);
}

static inline void regex_end(const RegexWork* w) { time_limit_end(w->time); }

__attribute__((noreturn))
static inline void regex_fail_(int status, size_t n, size_t at) {
    unsigned char why[200] = "";
    pcre2_get_error_message(status, why, sizeof why);
    fail_input("the tokenizer's regular expression gave up at byte %zu of a text of %zu (PCRE2: %s): expected words "
               "that are found in linear time; take the model's own tokenizer.json", at, n, (char*)why);
}

// The end of the word, or of the gap between two matches, that begins at `at`. *match_end remembers a match found
// behind a gap: start with 0.
static inline size_t regex_word_end_(const Splitter* splitter, const RegexWork* w, const unsigned char* s, size_t n,
                                     size_t at, size_t* match_end) {
    if (*match_end > at) { return *match_end; }
    int status = pcre2_match(splitter->regex, s, n, at, PCRE2_NO_UTF_CHECK, w->found, w->limits);
    // 32 KiB, for a group that repeats; the interpreter takes memory from the heap
    if (status == PCRE2_ERROR_JIT_STACKLIMIT) {
        status = pcre2_match(splitter->regex, s, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, w->found, w->limits);
    }
    if (status == PCRE2_ERROR_NOMATCH) { return n; }
    if (status < 0) { regex_fail_(status, n, at); }
    const size_t* ends = pcre2_get_ovector_pointer(w->found);
    *match_end = ends[1];
    return ends[0] > at ? ends[0] : ends[1];
}

// where the word that begins at `at` < n ends
static inline size_t word_end(const Splitter* splitter, const Unicode* u, const RegexWork* w, const unsigned char* s,
                              size_t n, size_t at, size_t* match_end) {
    if (splitter->kind == SPLIT_GPT2) { return word_end_gpt2(u, s, n, at); }
    if (splitter->kind == SPLIT_CHAT) { return word_end_chat(u, s, n, at, splitter->letter, splitter->n_digits); }
    return regex_word_end_(splitter, w, s, n, at, match_end);
}
#endif  // LLMC_PRETOKENIZE_H
