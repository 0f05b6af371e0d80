/*
Texts on one line (escape.h) and texts before which a generated one ends (stop.h).
*/
#include "llmc/core/rng.h"   // xorshift_u32
#include "llmc/test/test.h"  // Test, check, test_main
#include "llmc/text/stop.h"  // StopTexts, StopStream; escape.h

// ---- escapes ----

static void test_escape(Test* t) {
    const struct {
        const char *line, *text;
    } cases[] = {{"", ""}, {"a b ", "a b "}, {"\\n\\t\\\\n", "\n\t\\n"}, {"# \"x\"\\n", "# \"x\"\n"},
                 {"é\\né", "é\né"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ByteBuffer out = {NULL, 0, 0};
        ErrorText error;
        check(t, text_unescape(&out, cases[i].line, strlen(cases[i].line), &error), "case %zu is refused", i);
        check(t, out.n == strlen(cases[i].text) && memcmp(out.bytes ? (char*)out.bytes : "", cases[i].text, out.n) == 0,
              "case %zu: another text", i);
        char* line = text_escape(cases[i].text, strlen(cases[i].text), 100);
        check(t, strcmp(line, cases[i].line) == 0, "case %zu comes back as %s", i, line);
        free(line);
        buffer_free(&out);
    }
    char *cut = text_escape("ééé\nx", 8, 4), *whole = text_escape("ééé\n", 7, 4);
    char* bell = text_escape("a\ab\xc2\x9b", 5, 9);
    check(t, strcmp(cut, "ééé\\n...") == 0, "four characters: found %s", cut);
    check(t, strcmp(whole, "ééé\\n") == 0, "exactly four characters: found %s", whole);
    check(t, strcmp(bell, "a?b?") == 0, "control characters: found %s", bell);
    free(cut), free(whole), free(bell);
}

static void test_escape_refused(Test* t) {
    const struct {
        const char *line, *found;
    } cases[] = {{"\\d", "found \\d"}, {"ends in \\", "found \\"}, {"\\é", "found \\é"}, {"\\\\\\", "found \\"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ByteBuffer out = {NULL, 0, 0};
        ErrorText error = {""};
        const int ok = text_unescape(&out, cases[i].line, strlen(cases[i].line), &error);
        const size_t n = strlen(error.text), n_found = strlen(cases[i].found);
        check(t, !ok && n > n_found && strcmp(error.text + n - n_found, cases[i].found) == 0, "%s: found \"%s\"",
              cases[i].line, error.text);
        buffer_free(&out);
    }
}

// ---- stop texts ----

static void test_parse(Test* t) {
    StopTexts s;
    ErrorText error;
    check(t, stop_texts_parse(&s, "", &error) && s.n == 0, "\"\" is no text");
    stop_texts_free(&s);
    check(t, stop_texts_parse(&s, "User:\\|\\n\\n\\|<|im_end|>\\|a\\\\|b", &error) && s.n == 4, "four texts");
    const char* want[] = {"User:", "\n\n", "<|im_end|>", "a\\|b"};
    for (int i = 0; i < s.n; i++) { check(t, stop_texts_have(&s, want[i], strlen(want[i])), "text %d is missing", i); }
    check(t, !stop_texts_have(&s, "User", 4), "a beginning is not the text");
    stop_texts_free(&s);
    const char* wrong[] = {"\\|", "a\\|", "\\|a", "a\\|\\|b", "\\", "a\\|\\x"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        check(t, !stop_texts_parse(&s, wrong[i], &error), "%s is taken", wrong[i]);
        stop_texts_free(&s);
    }
}

// what a text gives in pieces of random lengths, 1..most; returns the most bytes that were held
static size_t in_pieces(ByteBuffer* out, const StopTexts* texts, const char* text, size_t n, uint32_t most,
                        uint64_t* random) {
    StopStream s;
    size_t n_more, most_held = 0;
    stop_stream_init(&s, texts);
    for (size_t at = 0, piece; at < n; at += piece) {
        piece = 1 + xorshift_u32(random) % most;
        piece = piece < n - at ? piece : n - at;
        const char* more = stop_stream_put(&s, text + at, piece, &n_more);
        buffer_append(out, more, n_more);
        if (s.held.n - n_more > most_held) { most_held = s.held.n - n_more; }
    }
    const char* more = stop_stream_end(&s, &n_more);
    buffer_append(out, more, n_more);
    stop_stream_free(&s);
    return most_held;
}

// where a text ends, by its definition: the first byte with which a stop text is complete, the longest of them
static size_t where_it_ends(const StopTexts* texts, const char* text, size_t n) {
    for (size_t end = 1; end <= n; end++) {
        size_t longest = 0;
        for (int i = 0; i < texts->n; i++) {
            const ByteBuffer* x = &texts->texts[i];
            if (x->n <= end && x->n > longest && memcmp(text + end - x->n, x->bytes, x->n) == 0) { longest = x->n; }
        }
        if (longest > 0) { return end - longest; }
    }
    return n;
}

static void check_pieces(Test* t, const char* stop, const char* text, size_t n, uint64_t* random) {
    StopTexts texts;
    ErrorText error;
    size_t longest = 1;
    check(t, stop_texts_parse(&texts, stop, &error), "%s: %s", stop, error.text);
    for (int i = 0; i < texts.n; i++) { longest = texts.texts[i].n > longest ? texts.texts[i].n : longest; }
    const size_t want = where_it_ends(&texts, text, n);
    for (uint32_t most = 1; most <= 9; most += 4) {
        ByteBuffer out = {NULL, 0, 0};
        const size_t held = in_pieces(&out, &texts, text, n, most, random);
        check(t, out.n == want && memcmp(out.bytes ? (char*)out.bytes : "", text, want) == 0,
              "--stop %s, pieces of 1..%u: %zu bytes of %.*s, expected %zu", stop, most, out.n, (int)n, text, want);
        check(t, held < longest, "--stop %s: %zu bytes held", stop, held);
        buffer_free(&out);
    }
    stop_texts_free(&texts);
}

static void test_pieces(Test* t) {
    uint64_t random = 7;
    const char* stops[] = {"b", "b\\|aab", "aaab\\|bb", "abab\\|ba", "aaaa\\|aaab\\|baa", "abcX\\|bc",
                           "ab\\|abc\\|b", ""};
    check_pieces(t, "é\\n\\|→", "une année\nde → plus", strlen("une année\nde → plus"), &random);
    for (int i = 0; i < 400; i++) {
        char text[32];
        const size_t n = xorshift_u32(&random) % sizeof text;
        for (size_t k = 0; k < n; k++) { text[k] = "aaabbcX"[xorshift_u32(&random) % 7]; }
        check_pieces(t, stops[i % 8], text, n, &random);
    }
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"escape", "\\n, \\t and \\\\ there and back; long texts are cut at a character", test_escape},
        {"escape refused", "a backslash before anything else", test_escape_refused},
        {"stop parse", "texts with \\| between them, none empty", test_parse},
        {"stop pieces", "the text ends before the stop text that is complete first, however it is cut", test_pieces},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
