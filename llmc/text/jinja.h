/*
A chat template of Hugging Face, which is a program in Jinja, in a spelling of its own, so that templates that differ in
their spelling alone can be told to be the same. Nothing is run here.
    jinja_canonical   the template in that spelling
    jinja_literal     the next text in quotes of it, with its escapes undone
Published templates are copied by hand and by tools: indented anew, quoted otherwise, commented. The spelling leaves:
    {{ message['role'] }}   {{message.role}}          no white space but between words; a key as an attribute
    'a\'b'                  "a'b"                     one kind of quotes
    {{ 'a' }}{{ 'b' + x }}  {{"ab"+x}}                what is written in a row is one expression, and texts join
    {#- why -#}             nothing                   also {% generation %}, a mark of trainers that writes nothing
    text                    {{"text"}}                text outside of tags, as far as it is written (below)
White space around tags goes where Jinja drops it as transformers has it set up (trim_blocks, lstrip_blocks): beside a
dash, the line end behind {% %} and {# #}, blanks in front of them in their line, and one line end at the very end. What
is left of it is a text like any other.
Errors: 0 with the reason for a tag or a text in quotes that does not end.
Source: pallets/jinja 3.1, lexer.py; huggingface/transformers 5.23, utils/chat_template_utils.py.
*/
#ifndef LLMC_JINJA_H
#define LLMC_JINJA_H
#include "../core/mapfile.h"  // ErrorText, error_set
#include "unicode.h"          // ByteBuffer, buffer_append
#include <ctype.h>

static inline int jinja_is_word_(int c) { return isalnum(c) || c == '_'; }

static inline int jinja_ends_with_(const ByteBuffer* out, const char* end) {
    const size_t n = strlen(end);
    return out->n >= n && memcmp(out->bytes + out->n - n, end, n) == 0;
}

// a text in quotes; behind another one and a plus it goes on with that
static inline void jinja_put_literal_(ByteBuffer* out, const char* text, size_t n) {
    if (jinja_ends_with_(out, "\"+")) { out->n -= 2; }
    else { buffer_append(out, "\"", 1); }
    for (size_t i = 0; i < n; i++) {
        const int is_escaped = text[i] == '"' || text[i] == '\\';
        if (is_escaped) { buffer_append(out, "\\", 1); }
        if (text[i] == '\n') { buffer_append(out, "\\n", 2); }
        else { buffer_append(out, text + i, 1); }
    }
    buffer_append(out, "\"", 1);
}

// the text between quotes, at s[0] the first of them; returns the length with both, 0 where the second is missing
static inline size_t jinja_unquote_(ByteBuffer* text, const char* s, size_t n) {
    text->n = 0;
    for (size_t i = 1; i < n; i++) {
        if (s[i] == s[0]) { return i + 1; }
        if (s[i] == '\\' && i + 1 < n) {
            const char c = s[++i];
            const char* named = c == 'n' ? "\n" : c == 't' ? "\t" : c == 'r' ? "\r" : NULL;
            if (!named && c != '\\' && c != '\'' && c != '"') { buffer_append(text, "\\", 1); }
            buffer_append(text, named ? named : &c, 1);
        } else {
            buffer_append(text, s + i, 1);
        }
    }
    return 0;
}

// a["role"] is a.role: the bracket stands at the end of `out`, and behind the text comes another one at s[0]
static inline int jinja_put_attribute_(ByteBuffer* out, const ByteBuffer* text, const char* s, size_t n) {
    const int before = out->n > 1 ? out->bytes[out->n - 2] : 0;
    int is_name = text->n > 0 && !isdigit(text->bytes[0]);
    for (size_t i = 0; i < text->n; i++) { is_name &= jinja_is_word_(text->bytes[i]); }
    if (!is_name || !jinja_ends_with_(out, "[") || !(jinja_is_word_(before) || before == ']') || n == 0 || *s != ']') {
        return 0;
    }
    out->bytes[out->n - 1] = '.';
    buffer_append(out, text->bytes, text->n);
    return 1;
}

// what stands in a tag, without its brackets and dashes
static inline int jinja_put_code_(ByteBuffer* out, const char* s, size_t n, ErrorText* error) {
    ByteBuffer text = {NULL, 0, 0};
    for (size_t i = 0; i < n;) {
        const size_t first = i;
        while (i < n && isspace((unsigned char)s[i])) { i++; }
        if (i == n) { break; }
        if (i > first && out->n > 0 && jinja_is_word_(out->bytes[out->n - 1]) && jinja_is_word_((unsigned char)s[i])) {
            buffer_append(out, " ", 1);
        }
        if (s[i] != '\'' && s[i] != '"') {
            buffer_append(out, s + i++, 1);
            continue;
        }
        const size_t length = jinja_unquote_(&text, s + i, n - i);
        if (length == 0) {
            error_set(error, "expected a chat template, found a text without its second quote: %.40s", s + i);
            buffer_free(&text);
            return 0;
        }
        i += length;
        if (jinja_put_attribute_(out, &text, s + i, n - i)) { i++; }
        else { jinja_put_literal_(out, (const char*)text.bytes, text.n); }
    }
    buffer_free(&text);
    return 1;
}

// an expression that is written: behind another one it is a part of that
static inline void jinja_begin_output_(ByteBuffer* out) {
    if (jinja_ends_with_(out, "}}")) {
        out->n -= 2;
        buffer_append(out, "+", 1);
    } else {
        buffer_append(out, "{{", 2);
    }
}

// the end of a tag at s[0], behind its second bracket; a text in quotes may hold anything. 0: it has none
static inline size_t jinja_tag_end_(const char* s, size_t n) {
    const char close[3] = {s[1] == '{' ? '}' : s[1], '}', '\0'};
    char quote = 0;
    for (size_t i = 2; i + 1 < n; i++) {
        if (quote) {
            if (s[i] == '\\') { i++; }  // what it escapes does not end the text
            else if (s[i] == quote) { quote = 0; }
        } else if (s[1] != '#' && (s[i] == '\'' || s[i] == '"')) {
            quote = s[i];
        } else if (memcmp(s + i, close, 2) == 0) {
            return i + 2;
        }
    }
    return 0;
}

static inline size_t jinja_next_tag_(const char* s, size_t n, size_t at) {
    while (at + 1 < n && !(s[at] == '{' && strchr("{%#", s[at + 1]) && s[at + 1])) { at++; }
    return at + 1 < n ? at : n;
}

// the text s[at .. tag) between two tags, as far as it is written. before: the end of the tag before, 0: none
static inline void jinja_put_between_(ByteBuffer* out, const char* s, size_t n, size_t at, size_t tag, size_t before) {
    size_t end = tag;
    const char kind = tag < n ? s[tag + 1] : 0, mark = tag + 2 < n ? s[tag + 2] : 0;
    if (before > 2 && s[before - 3] == '-') {
        while (at < end && isspace((unsigned char)s[at])) { at++; }
    } else if (before > 0 && s[before - 2] != '}' && at < end && s[at] == '\n') {
        at++;
    }
    if (tag < n && mark == '-') {
        while (end > at && isspace((unsigned char)s[end - 1])) { end--; }
    } else if (kind == '%' || kind == '#') {
        size_t line = end;
        while (line > at && (s[line - 1] == ' ' || s[line - 1] == '\t')) { line--; }
        if (line == 0 || s[line - 1] == '\n') { end = line; }
    }
    if (tag == n && end > at && s[end - 1] == '\n') { end--; }
    if (end == at) { return; }
    jinja_begin_output_(out);
    jinja_put_literal_(out, s + at, end - at);
    buffer_append(out, "}}", 2);
}

static inline int jinja_put_tag_(ByteBuffer* out, const char* s, size_t n, ErrorText* error) {
    const char kind = s[1];
    s += 2, n -= 4;
    if (n > 0 && (*s == '-' || *s == '+')) { s++, n--; }
    if (n > 0 && s[n - 1] == '-') { n--; }
    if (kind == '#') { return 1; }
    const size_t first = out->n;
    if (kind == '{') { jinja_begin_output_(out); }
    else { buffer_append(out, "{%", 2); }
    if (!jinja_put_code_(out, s, n, error)) { return 0; }
    buffer_append(out, kind == '{' ? "}}" : "%}", 2);
    if (jinja_ends_with_(out, "{%generation%}") || jinja_ends_with_(out, "{%endgeneration%}")) { out->n = first; }
    return 1;
}

static inline int jinja_put_all_(ByteBuffer* out, const char* s, size_t n, ErrorText* error) {
    size_t before = 0;
    for (size_t at = 0; at < n;) {
        const size_t tag = jinja_next_tag_(s, n, at);
        jinja_put_between_(out, s, n, at, tag, before);
        if (tag == n) { break; }
        const size_t length = jinja_tag_end_(s + tag, n - tag);
        if (length == 0) {
            return error_set(error, "expected a chat template, found a tag without its end: %.40s", s + tag);
        }
        if (!jinja_put_tag_(out, s + tag, length, error)) { return 0; }
        at = before = tag + length;
    }
    return 1;
}

// appends it to `out`, with a 0 behind that is not counted; 1, or 0 with the reason
static inline int jinja_canonical(ByteBuffer* out, const char* jinja, size_t n_bytes, ErrorText* error) {
    ByteBuffer source = {NULL, 0, 0};
    for (size_t i = 0; i < n_bytes; i++) {  // \r\n and \r are line ends too
        const int is_pair = jinja[i] == '\r' && i + 1 < n_bytes && jinja[i + 1] == '\n';
        if (!is_pair) { buffer_append(&source, jinja[i] == '\r' ? "\n" : jinja + i, 1); }
    }
    buffer_append(&source, "", 1);
    const int ok = jinja_put_all_(out, (const char*)source.bytes, source.n - 1, error);
    buffer_append(out, "", 1);
    out->n--;
    buffer_free(&source);
    return ok;
}

// The next text in quotes of a canonical template, from *at on, which goes behind it; 0: there is none.
static inline int jinja_literal(ByteBuffer* text, const char* canonical, size_t n, size_t* at) {
    while (*at < n && canonical[*at] != '"') { ++*at; }
    const size_t length = *at < n ? jinja_unquote_(text, canonical + *at, n - *at) : 0;
    *at += length;
    return length > 0;
}
#endif  // LLMC_JINJA_H
