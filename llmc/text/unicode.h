/*
Unicode for tokenizers: UTF-8, classes of characters, and the normal form NFC.
    utf8_decode       one character, or how many bytes are none; utf8_next the same for text known to be valid
    utf8_repair       a copy in which what is no UTF-8 became U+FFFD
    unicode_init      flags[code point] = UNICODE_LETTER | UNICODE_NUMBER ...: 1.1 MB, of which text touches a few pages
    nfc_append        NFC: e + combining acute becomes é. Only characters that may change, and their neighbours, are
                      worked on
    ByteBuffer        bytes that grow
Invalid UTF-8: each longest beginning of a character that breaks off, or else one byte, becomes one U+FFFD, as Python's
bytes.decode(errors="replace") and Rust's from_utf8_lossy do.
Order:  NFC decomposes fully, sorts each run of marks by combining class (stable), then composes from left to right.
Cost:   linear in the length of the text, also for a million marks on one letter.
Source: Unicode Standard 16.0, table 3-7 and annex 15 (tables of 9.0 for NFC: see unicode_tables.h).
*/
#ifndef LLMC_UNICODE_H
#define LLMC_UNICODE_H
#include "../core/memory.h"     // memory_need
#include "unicode_tables.h"  // unicode_class_ranges_, unicode_marks_, unicode_decompositions_
#include <stddef.h>

// ---- bytes that grow ----

typedef struct {
    unsigned char* bytes;
    size_t n, capacity;
} ByteBuffer;

static inline void buffer_reserve(ByteBuffer* b, size_t n_more) {
    if (n_more <= b->capacity - b->n) { return; }
    size_t grown = b->capacity + b->capacity / 2 + 64;
    b->capacity = grown > b->n + n_more ? grown : b->n + n_more;
    memory_need(b->capacity - b->n, "text");
    b->bytes = (unsigned char*)realloc_check(b->bytes, b->capacity, "text");
}

static inline void buffer_append(ByteBuffer* b, const void* bytes, size_t n) {
    if (n == 0) { return; }
    buffer_reserve(b, n);
    memcpy(b->bytes + b->n, bytes, n);
    b->n += n;
}

static inline void buffer_append_text(ByteBuffer* b, const char* text) { buffer_append(b, text, strlen(text)); }

static inline void buffer_free(ByteBuffer* b) {
    free(b->bytes);
    memset(b, 0, sizeof *b);
}

// ---- UTF-8 ----

// The character at s, n >= 1 bytes before the end: its length 1..4 with *code set. -k: the first k bytes are none; then
// *cut says whether only the end of the bytes is in the way.
static inline int utf8_decode(const unsigned char* s, size_t n, uint32_t* code, int* cut) {
    unsigned char c = s[0], low = 0x80, high = 0xbf;  // range of the second byte
    int length = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    *cut = 0;
    *code = c;
    if (length <= 1) { return length ? 1 : -1; }
    if (c == 0xe0) { low = 0xa0; }   // not overlong
    if (c == 0xed) { high = 0x9f; }  // no surrogates
    if (c == 0xf0) { low = 0x90; }
    if (c == 0xf4) { high = 0x8f; }  // at most U+10FFFF
    *code = c & (0x7fu >> length);
    for (int i = 1; i < length; i++) {
        *cut = (size_t)i >= n;
        if (*cut || s[i] < low || s[i] > high) { return -i; }
        *code = *code << 6 | (s[i] & 0x3f);
        low = 0x80;
        high = 0xbf;
    }
    return length;
}

// the character at s in valid UTF-8: its length, and *code
static inline int utf8_next(const unsigned char* s, uint32_t* code) {
    if (s[0] < 0x80) {
        *code = s[0];
        return 1;
    }
    if (s[0] < 0xe0) {
        *code = (uint32_t)(s[0] & 0x1f) << 6 | (s[1] & 0x3f);
        return 2;
    }
    if (s[0] < 0xf0) {
        *code = (uint32_t)(s[0] & 0x0f) << 12 | (uint32_t)(s[1] & 0x3f) << 6 | (s[2] & 0x3f);
        return 3;
    }
    *code = (uint32_t)(s[0] & 0x07) << 18 | (uint32_t)(s[1] & 0x3f) << 12 | (uint32_t)(s[2] & 0x3f) << 6 |
            (s[3] & 0x3f);
    return 4;
}

// where the character before `at` begins, at > 0, in valid UTF-8
static inline size_t utf8_before(const unsigned char* s, size_t at) {
    do { at--; } while ((s[at] & 0xc0) == 0x80);
    return at;
}

// writes 1..4 bytes, returns how many
static inline int utf8_put(unsigned char* out, uint32_t code) {
    int length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    if (length == 1) {
        out[0] = (unsigned char)code;
        return 1;
    }
    for (int i = length - 1; i > 0; i--) {
        out[i] = (unsigned char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (unsigned char)(0xf00u >> length | code);
    return length;
}

static inline void buffer_append_code(ByteBuffer* b, uint32_t code) {
    buffer_reserve(b, 4);
    b->n += (size_t)utf8_put(b->bytes + b->n, code);
}

// how many bytes at the start are valid UTF-8; eight ASCII bytes at a time
static inline size_t utf8_valid_prefix(const unsigned char* s, size_t n) {
    size_t at = 0;
    while (at < n) {
        uint64_t eight;
        uint32_t code;
        int cut;
        if (n - at >= 8 && (memcpy(&eight, s + at, 8), (eight & 0x8080808080808080u) == 0)) {
            at += 8;
            continue;
        }
        int length = utf8_decode(s + at, n - at, &code, &cut);
        if (length < 0) { break; }
        at += (size_t)length;
    }
    return at;
}

// append the text with U+FFFD for what is no UTF-8
static inline void utf8_repair(ByteBuffer* out, const unsigned char* s, size_t n) {
    while (n > 0) {
        size_t valid = utf8_valid_prefix(s, n);
        uint32_t code;
        int cut;
        buffer_append(out, s, valid);
        if (valid == n) { break; }
        size_t bad = (size_t)-utf8_decode(s + valid, n - valid, &code, &cut);
        buffer_append_code(out, 0xfffd);
        s += valid + bad;
        n -= valid + bad;
    }
}

// ---- classes ----

enum {
    UNICODE_LETTER = 1, UNICODE_NUMBER = 2, UNICODE_MARK = 4, UNICODE_SPACE = 8, UNICODE_WORD = 16,
    UNICODE_NOT_NFC = 32,  // may change in NFC, by itself or by what stands before it
    UNICODE_CODES = 0x110000, UNICODE_COMPOSES = (int)0x80000000,
    HANGUL_L = 0x1100, HANGUL_V = 0x1161, HANGUL_T = 0x11a7, HANGUL_S = 0xac00, HANGUL_N = 11172
};

typedef struct { uint64_t pair; uint32_t code; } Composition;  // first << 32 | second

typedef struct {
    unsigned char* flags;        // (UNICODE_CODES)
    Composition* compositions;   // by pair
    int n_compositions;
} Unicode;

static inline int unicode_compare_compositions_(const void* a, const void* b) {
    uint64_t x = ((const Composition*)a)->pair, y = ((const Composition*)b)->pair;
    return (x > y) - (x < y);
}

static inline void unicode_init(Unicode* u) {
    int n_classes, n_marks, n;
    const UnicodeRow *classes = unicode_class_ranges_(&n_classes), *marks = unicode_marks_(&n_marks);
    const UnicodeRow* rows = unicode_decompositions_(&n);
    u->flags = (unsigned char*)calloc(UNICODE_CODES, 1);
    u->compositions = (Composition*)malloc_check((size_t)n * sizeof(Composition), "Unicode tables");
    u->n_compositions = 0;
    if (!u->flags) { fail_run("Unicode tables: no memory"); }
    for (int i = 0; i < n_classes; i++) {
        memset(u->flags + classes[i].a, (int)classes[i].c, classes[i].b - classes[i].a + 1);
    }
    for (int i = 0; i < n_marks; i++) {
        for (uint32_t c = marks[i].a; c <= marks[i].b; c++) { u->flags[c] |= UNICODE_NOT_NFC; }
    }
    for (int i = 0; i < n; i++) {
        uint32_t second = rows[i].c & ~(uint32_t)UNICODE_COMPOSES;
        if (rows[i].c == second) {
            u->flags[rows[i].a] |= UNICODE_NOT_NFC;  // does not come back
            continue;
        }
        u->flags[second] |= UNICODE_NOT_NFC;  // may join what stands before it
        Composition composition = {(uint64_t)rows[i].b << 32 | second, rows[i].a};
        u->compositions[u->n_compositions++] = composition;
    }
    for (uint32_t c = HANGUL_V; c < HANGUL_V + 21; c++) { u->flags[c] |= UNICODE_NOT_NFC; }
    for (uint32_t c = HANGUL_T + 1; c < HANGUL_T + 28; c++) { u->flags[c] |= UNICODE_NOT_NFC; }
    qsort(u->compositions, (size_t)u->n_compositions, sizeof(Composition), unicode_compare_compositions_);
}

static inline void unicode_free(Unicode* u) {
    free(u->flags);
    free(u->compositions);
    memset(u, 0, sizeof *u);
}

// ---- NFC ----

typedef struct { uint32_t code, combining_class; } NfcChar;

typedef struct {
    NfcChar *chars, *sorted;
    size_t n, capacity;
} NfcRegion;

static inline uint32_t unicode_combining_class_(uint32_t code) {
    int n, low = 0;
    const UnicodeRow* rows = unicode_marks_(&n);
    for (int high = n; low < high;) {  // the first row that does not end before code
        int middle = (low + high) / 2;
        if (rows[middle].b < code) { low = middle + 1; } else { high = middle; }
    }
    return low < n && rows[low].a <= code ? rows[low].c : 0;
}

static inline void nfc_push_(NfcRegion* r, uint32_t code) {
    if (r->n == r->capacity) {
        r->capacity = 2 * r->capacity + 32;
        r->chars = (NfcChar*)realloc_check(r->chars, r->capacity * sizeof(NfcChar), "NFC");
        r->sorted = (NfcChar*)realloc_check(r->sorted, r->capacity * sizeof(NfcChar), "NFC");
    }
    r->chars[r->n].code = code;
    r->chars[r->n++].combining_class = unicode_combining_class_(code);
}

// full canonical decomposition; the second of two never decomposes further
static inline void nfc_decompose_(NfcRegion* r, uint32_t code) {
    if (code - HANGUL_S < HANGUL_N) {
        uint32_t s = code - HANGUL_S;
        nfc_push_(r, HANGUL_L + s / 588);
        nfc_push_(r, HANGUL_V + s % 588 / 28);
        if (s % 28) { nfc_push_(r, HANGUL_T + s % 28); }
        return;
    }
    int n, low = 0;
    const UnicodeRow* rows = unicode_decompositions_(&n);
    for (int high = n; low < high;) {
        int middle = (low + high) / 2;
        if (rows[middle].a < code) { low = middle + 1; } else { high = middle; }
    }
    if (low == n || rows[low].a != code) {
        nfc_push_(r, code);
        return;
    }
    uint32_t second = rows[low].c & ~(uint32_t)UNICODE_COMPOSES;
    nfc_decompose_(r, rows[low].b);
    if (second) { nfc_push_(r, second); }
}

// chars[from..to), all marks, into the order of their classes: a counting sort, stable and linear
static inline void nfc_sort_marks_(NfcRegion* r, size_t from, size_t to) {
    size_t starts[257] = {0};
    for (size_t i = from; i < to; i++) { starts[r->chars[i].combining_class + 1]++; }
    for (int i = 0; i < 256; i++) { starts[i + 1] += starts[i]; }
    for (size_t i = from; i < to; i++) { r->sorted[starts[r->chars[i].combining_class]++] = r->chars[i]; }
    memcpy(r->chars + from, r->sorted, (to - from) * sizeof(NfcChar));
}

// what the two become, 0 when they do not join
static inline uint32_t nfc_compose_pair_(const Unicode* u, uint32_t first, uint32_t second) {
    if (first - HANGUL_L < 19 && second - HANGUL_V < 21) {
        return HANGUL_S + ((first - HANGUL_L) * 21 + second - HANGUL_V) * 28;
    }
    if (first - HANGUL_S < HANGUL_N && (first - HANGUL_S) % 28 == 0 && second - HANGUL_T - 1 < 27) {
        return first + second - HANGUL_T;
    }
    Composition key = {(uint64_t)first << 32 | second, 0};
    const Composition* found = (const Composition*)bsearch(&key, u->compositions, (size_t)u->n_compositions,
                                                           sizeof key, unicode_compare_compositions_);
    return found ? found->code : 0;
}

// decomposed characters to their normal form, in place
static inline void nfc_compose_(const Unicode* u, NfcRegion* r) {
    size_t n_kept = 0, starter = SIZE_MAX;
    int64_t last = -1;  // class of the last character kept after the starter, -1: none
    for (size_t from = 0, to = 0; from < r->n; from = to + (to == from)) {
        for (to = from; to < r->n && r->chars[to].combining_class > 0; to++) {}
        if (to - from > 1) { nfc_sort_marks_(r, from, to); }
    }
    for (size_t i = 0; i < r->n; i++) {
        NfcChar c = r->chars[i];
        uint32_t joined = starter != SIZE_MAX && last < (int64_t)c.combining_class
                              ? nfc_compose_pair_(u, r->chars[starter].code, c.code) : 0;
        if (joined) {
            r->chars[starter].code = joined;
            continue;
        }
        if (c.combining_class == 0) { starter = n_kept; }
        last = c.combining_class == 0 ? -1 : (int64_t)c.combining_class;
        r->chars[n_kept++] = c;
    }
    r->n = n_kept;
}

// the first character of valid UTF-8 from `at` on that NFC may change, judged alone; n when there is none
static inline size_t nfc_first_change_(const Unicode* u, const unsigned char* s, size_t n, size_t at) {
    while (at < n) {
        uint32_t code;
        int length = utf8_next(s + at, &code);
        if (u->flags[code] & UNICODE_NOT_NFC) { break; }
        at += (size_t)length;
    }
    return at;
}

// Append NFC of valid UTF-8. A region that may change runs from the character before the first doubtful one, which it
// may join, up to the next that is not doubtful.
static inline void nfc_append(ByteBuffer* out, const Unicode* u, const unsigned char* s, size_t n) {
    NfcRegion region = {NULL, NULL, 0, 0};
    for (size_t at = 0; at < n;) {
        size_t doubtful = nfc_first_change_(u, s, n, at);
        size_t from = doubtful > at && doubtful < n ? utf8_before(s, doubtful) : doubtful;
        buffer_append(out, s + at, from - at);
        region.n = 0;
        for (at = from; at < n;) {
            uint32_t code;
            int length = utf8_next(s + at, &code);
            if (at >= doubtful && !(u->flags[code] & UNICODE_NOT_NFC)) { break; }
            nfc_decompose_(&region, code);
            at += (size_t)length;
        }
        nfc_compose_(u, &region);
        for (size_t i = 0; i < region.n; i++) { buffer_append_code(out, region.chars[i].code); }
    }
    free(region.chars);
    free(region.sorted);
}
#endif  // LLMC_UNICODE_H
