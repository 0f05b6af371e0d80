/*
Text on one line, as options and files of lines have it: \n newline, \t tab, \\ backslash; everything else stands for
itself.
    text_unescape   a line's text
    text_escape     the line of a text, of at most so many characters; what is left out becomes "..."
Errors: text_unescape returns 0 with the reason for a backslash before anything else.
*/
#ifndef LLMC_ESCAPE_H
#define LLMC_ESCAPE_H
#include "../core/mapfile.h"  // ErrorText, error_set
#include "unicode.h"          // ByteBuffer, buffer_append, utf8_next

// appends the text of the line, which is UTF-8, to `out`
static inline int text_unescape(ByteBuffer* out, const char* line, size_t n_bytes, ErrorText* error) {
    static const char names[] = "nt\\", meanings[] = "\n\t\\";
    for (size_t i = 0; i < n_bytes; i++) {
        if (line[i] != '\\') {
            buffer_append(out, line + i, 1);
            continue;
        }
        const char* name = ++i < n_bytes && line[i] ? strchr(names, line[i]) : NULL;
        if (!name) {
            uint32_t code;
            const int length = i < n_bytes ? utf8_next((const unsigned char*)line + i, &code) : 0;
            return error_set(error, "expected \\n, \\t or \\\\, a backslash itself, found \\%.*s", length, line + i);
        }
        buffer_append(out, meanings + (name - names), 1);
    }
    return 1;
}

// one character: a control character that has no name becomes "?"
static inline void text_escape_character_(ByteBuffer* out, const char* text, size_t n_bytes) {
    const char c = *text;
    if (c == '\n' || c == '\t' || c == '\\') { buffer_append(out, c == '\n' ? "\\n" : c == '\t' ? "\\t" : "\\\\", 2); }
    else if ((unsigned char)c < ' ' || c == 127 || (c == '\xc2' && (unsigned char)text[1] < 0xa0)) {
        buffer_append(out, "?", 1);
    }
    else { buffer_append(out, text, n_bytes); }
}

// the text must be UTF-8; the line, to be freed by the caller, ends with a 0
static inline char* text_escape(const char* text, size_t n_bytes, int most) {
    ByteBuffer out = {NULL, 0, 0};
    int length;
    for (size_t i = 0; i < n_bytes && most >= 0; i += (size_t)length) {
        uint32_t code;
        length = utf8_next((const unsigned char*)text + i, &code);
        if (most-- == 0) { buffer_append(&out, "...", 3); }
        else { text_escape_character_(&out, text + i, (size_t)length); }
    }
    buffer_append(&out, "", 1);
    return (char*)out.bytes;
}
#endif  // LLMC_ESCAPE_H
