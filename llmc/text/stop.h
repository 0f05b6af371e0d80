/*
--stop: a text that comes in pieces ends before any of several others, wherever these begin: inside a token or a piece,
over several of them.
    stop_texts_parse    User:\|\n\n: texts with \| between them, each as escape.h has it; "" is none
    stop_texts_add      one more, as it is
    stop_stream_put     a piece of the text; returns what of the text so far is certain to be in front of all stop texts
    stop_stream_end     no piece follows: what was held back
    stop_texts_have     is this one of them? For tokens that are no text, <|im_end|>
The stop text that is complete first ends the text, of those complete with the same byte the one that began first: so
the result does not depend on the pieces. What could be the beginning of a stop text is held back until it is none.
Cost:   a byte of text is compared with the end of each stop text; held are fewer bytes than the longest has.
*/
#ifndef LLMC_STOP_H
#define LLMC_STOP_H
#include "escape.h"  // text_unescape, ByteBuffer, ErrorText

typedef struct {
    ByteBuffer* texts;
    int n;
} StopTexts;

static inline void stop_texts_free(StopTexts* s) {
    for (int i = 0; i < s->n; i++) { buffer_free(&s->texts[i]); }
    free(s->texts);
    memset(s, 0, sizeof *s);
}

// takes the text
static inline void stop_texts_append_(StopTexts* s, ByteBuffer text) {
    s->texts = (ByteBuffer*)realloc_check(s->texts, sizeof(ByteBuffer) * ((size_t)s->n + 1), "stop texts");
    s->texts[s->n++] = text;
}

static inline void stop_texts_add(StopTexts* s, const char* text) {
    ByteBuffer copy = {NULL, 0, 0};
    buffer_append_text(&copy, text);
    stop_texts_append_(s, copy);
}

static inline int stop_texts_add_(StopTexts* s, const char* line, size_t n_bytes, ErrorText* error) {
    ByteBuffer text = {NULL, 0, 0};
    const int ok = text_unescape(&text, line, n_bytes, error);
    stop_texts_append_(s, text);
    return ok && text.n == 0 ? error_set(error, "expected texts with \\| between them, found an empty one") : ok;
}

// 1, or 0 with the reason in `error`; to be freed in both cases
static inline int stop_texts_parse(StopTexts* s, const char* line, ErrorText* error) {
    memset(s, 0, sizeof *s);
    for (const char* end = line; *line; line = end) {
        while (*end && strncmp(end, "\\|", 2) != 0) { end += *end == '\\' && end[1] ? 2 : 1; }
        if (!stop_texts_add_(s, line, (size_t)(end - line), error)) { return 0; }
        if (*end && !*(end += 2)) { return stop_texts_add_(s, end, 0, error); }
    }
    return 1;
}

static inline int stop_texts_have(const StopTexts* s, const char* text, size_t n_bytes) {
    for (int i = 0; i < s->n; i++) {
        if (s->texts[i].n == n_bytes && memcmp(s->texts[i].bytes, text, n_bytes) == 0) { return 1; }
    }
    return 0;
}

// ---- a text in pieces ----

typedef struct {
    const StopTexts* texts;
    ByteBuffer held;    // first what the last call returned, then what is not certain yet
    size_t n_returned;
    int found;          // the text has ended
} StopStream;

static inline void stop_stream_init(StopStream* s, const StopTexts* texts) {
    memset(s, 0, sizeof *s);
    s->texts = texts;
    buffer_reserve(&s->held, 1);
}

static inline void stop_stream_free(StopStream* s) { buffer_free(&s->held); }

// do the first n bytes end with this text's first `length` bytes?
static inline int stop_ends_with_(const StopStream* s, size_t n, const ByteBuffer* text, size_t length) {
    return length <= n && memcmp(s->held.bytes + n - length, text->bytes, length) == 0;
}

// bytes of the longest stop text with which the first n bytes end, 0: none
static inline size_t stop_found_(const StopStream* s, size_t n) {
    size_t longest = 0;
    for (int i = 0; i < s->texts->n; i++) {
        const ByteBuffer* text = &s->texts->texts[i];
        if (text->n > longest && stop_ends_with_(s, n, text, text->n)) { longest = text->n; }
    }
    return longest;
}

// bytes at the end of those held that a stop text may have begun with, and so are not certain; 0: none
static inline size_t stop_begun_(const StopStream* s) {
    size_t longest = 0;
    for (int i = 0; i < s->texts->n; i++) {
        const ByteBuffer* text = &s->texts->texts[i];
        size_t length = text->n - 1;  // a whole one would have been found
        while (length > longest && !stop_ends_with_(s, s->held.n, text, length)) { length--; }
        longest = length > longest ? length : longest;
    }
    return longest;
}

// what the last call returned goes
static inline void stop_stream_forget_(StopStream* s) {
    s->held.n -= s->n_returned;
    memmove(s->held.bytes, s->held.bytes + s->n_returned, s->held.n);
    s->n_returned = 0;
}

// the first n of the bytes held
static inline const char* stop_stream_return_(StopStream* s, size_t n, size_t* n_bytes) {
    *n_bytes = s->n_returned = n;
    return (const char*)s->held.bytes;
}

// valid until the next call; after the stop text nothing more comes
static inline const char* stop_stream_put(StopStream* s, const char* text, size_t n, size_t* n_bytes) {
    stop_stream_forget_(s);
    if (s->found) { return stop_stream_return_(s, 0, n_bytes); }
    const size_t n_before = s->held.n;
    buffer_append(&s->held, text, n);
    for (size_t end = n_before + 1; end <= s->held.n; end++) {  // no stop text ends earlier: it would have been found
        const size_t n_stop = stop_found_(s, end);
        if (n_stop > 0) {
            s->found = 1;
            s->held.n = end - n_stop;  // the stop text goes, and what came behind it
            return stop_stream_return_(s, s->held.n, n_bytes);
        }
    }
    return stop_stream_return_(s, s->held.n - stop_begun_(s), n_bytes);
}

static inline const char* stop_stream_end(StopStream* s, size_t* n_bytes) {
    stop_stream_forget_(s);
    return stop_stream_return_(s, s->held.n, n_bytes);
}
#endif  // LLMC_STOP_H
