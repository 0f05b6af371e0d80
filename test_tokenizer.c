/*
Promises of llmc/text/tokenizer.h and what is below it (unicode.h, pretokenize.h, bpe.h, tokenizer_pipeline.h,
tokenizer_json.h):
the ids are those of Hugging Face tokenizers, whatever the text; what a file has wrong is said in one line.
    cc -std=gnu11 -D_GNU_SOURCE -O2 test_tokenizer.c -o build/test_tokenizer -ljansson -lpcre2-8 -lm &&
    build/test_tokenizer
The large comparison, 100,000 strings for each of some forty files, is dev/ref/check_tokenizer.py.
*/
#include "llmc/test/test.h"
#include "llmc/test/testfiles.h"
#include "llmc/text/tokenizer.h"
#include <glob.h>

// ---- tokenizer.json files of a few hundred tokens, made here ----

#define QWEN2_REGEX \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|" \
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN35_REGEX \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|" \
    " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define LLAMA3_REGEX \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|" \
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define GPT2_REGEX "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

// one merge after the other: the two tokens, and the new one at the end of the vocabulary
static void add_merges(json_t* model, const char* const* pairs, size_t n_pairs) {
    json_t *vocab = json_object_get(model, "vocab"), *merges = json_array();
    for (size_t i = 0; i < n_pairs; i++) {
        char joined[64];
        size_t n_left = strcspn(pairs[i], " ");
        snprintf(joined, sizeof joined, "%.*s%s", (int)n_left, pairs[i], pairs[i] + n_left + 1);
        json_array_append_new(merges, json_string(pairs[i]));
        json_object_set_new(vocab, joined, json_integer((json_int_t)json_object_size(vocab)));
    }
    json_object_set_new(model, "merges", merges);
}

// Byte level: token i is byte i; then " t" 256, "he" 257, " the" 258, "ab" 259, "abab" 260; added: <|endoftext|> 261,
// <x> 262
static json_t* byte_level_file(void) {
    const char* pairs[] = {"\xc4\xa0 t", "h e", "\xc4\xa0t he", "a b", "ab ab"};
    short to_byte[N_BYTE_CHARS];
    json_t* vocab = json_object();
    pipeline_byte_characters_(to_byte);
    for (uint32_t code = 0; code < N_BYTE_CHARS; code++) {
        unsigned char name[5] = "";
        name[utf8_put(name, code)] = '\0';
        if (to_byte[code] >= 0) { json_object_set_new(vocab, (const char*)name, json_integer(to_byte[code])); }
    }
    json_t* file = json_pack(
        "{s:[{s:i, s:s, s:b, s:b, s:b, s:b, s:b}, {s:i, s:s, s:b, s:b, s:b, s:b, s:b}], s:{s:s}, s:{s:s, s:[{s:s, "
        "s:{s:s}, s:s}, {s:s, s:b, s:b}]}, s:{s:s}, s:{s:s, s:o}}",
        "added_tokens", "id", 261, "content", "<|endoftext|>", "special", 1, "normalized", 0, "lstrip", 0, "rstrip", 0,
        "single_word", 0,
        "id", 262, "content", "<x>", "special", 0, "normalized", 0, "lstrip", 0, "rstrip", 0, "single_word", 0,
        "normalizer", "type", "NFC", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern",
        "Regex", QWEN2_REGEX,
        "behavior", "Isolated", "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0, "decoder", "type",
        "ByteLevel",
        "model", "type", "BPE", "vocab", vocab);
    add_merges(json_object_get(file, "model"), pairs, sizeof pairs / sizeof pairs[0]);
    return file;
}

// Mistral v0.1: <unk> 0, <s> 1, </s> 2, bytes 3..258, "▁" 259, a 260, b 261, c 262; "▁a" 263, "bc" 264, "▁abc" 265
static json_t* character_file(void) {
    const char *names[] = {"▁", "a", "b", "c"}, *pairs[] = {"▁ a", "b c", "▁a bc"};
    json_t* vocab = json_pack("{s:i, s:i, s:i}", "<unk>", 0, "<s>", 1, "</s>", 2);
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", byte);
        json_object_set_new(vocab, name, json_integer(3 + byte));
    }
    for (int i = 0; i < 4; i++) { json_object_set_new(vocab, names[i], json_integer(259 + i)); }
    json_t* file = json_pack(
        "{s:[{s:i, s:s, s:b, s:b}, {s:i, s:s, s:b, s:b}], s:{s:s, s:[{s:s, s:s}, {s:s, s:{s:s}, s:s}]}, s:n,"
        " s:{s:s, s:[{s:{s:s}}, {s:{s:s}}], s:{s:{s:[i]}}}, s:{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}, {s:s, s:s, "
        "s:i, s:i}]}, s:{s:s, s:b, s:b, s:s, s:o}}",
        "added_tokens", "id", 1, "content", "<s>", "special", 1, "normalized", 0, "id", 2, "content", "</s>", "special",
        1, "normalized", 0,
        "normalizer", "type", "Sequence", "normalizers", "type", "Prepend", "prepend", "▁", "type", "Replace",
        "pattern", "String",
        " ", "content", "▁", "pre_tokenizer", "post_processor", "type", "TemplateProcessing", "single", "SpecialToken",
        "id",
        "<s>", "Sequence", "id", "A", "special_tokens", "<s>", "ids", 1, "decoder", "type", "Sequence", "decoders",
        "type", "Replace", "pattern",
        "String", "▁", "content", " ", "type", "ByteFallback", "type", "Fuse", "type", "Strip", "content", " ", "start",
        1, "stop", 0,
        "model", "type", "BPE", "byte_fallback", 1, "fuse_unk", 1, "unk_token", "<unk>", "vocab", vocab);
    add_merges(json_object_get(file, "model"), pairs, sizeof pairs / sizeof pairs[0]);
    return file;
}

// file.a.b.0 = value, given as JSON; "-" takes the key away
static void edit(json_t* file, const char* path, const char* value) {
    char keys[200], *rest = NULL;
    json_t* node = file;
    snprintf(keys, sizeof keys, "%s", path);
    char* key = strtok_r(keys, ".", &rest);
    for (char* next; (next = strtok_r(NULL, ".", &rest)); key = next) {
        node = json_is_array(node) ? json_array_get(node, (size_t)atoi(key)) : json_object_get(node, key);
    }
    json_t* parsed = json_loads(value, JSON_DECODE_ANY, NULL);
    if (strcmp(value, "-") == 0) { json_object_del(node, key); }
    else if (!parsed || !node) { fail_run("test: cannot set %s to %s", path, value);
    } else if (json_is_array(node) && (size_t)atoi(key) < json_array_size(node)) {
        json_array_set_new(node, (size_t)atoi(key), parsed);
    } else if (json_is_array(node)) {
        json_array_append_new(node, parsed);
    } else {
        json_object_set_new(node, key, parsed);
    }
}

// parse a copy of exactly this size; 1, or 0 with nothing left to free
static int parse_bytes(Tokenizer* k, const char* bytes, size_t n_bytes, ErrorText* error) {
    unsigned char* exact = heap_copy(bytes, n_bytes);
    int ok = tokenizer_parse_json_(k, exact, n_bytes, error);
    free(exact);
    return ok;
}

// takes the file
static int parse_file(Tokenizer* k, json_t* file, ErrorText* error) {
    char* text = json_dumps(file, JSON_COMPACT);
    int ok = parse_bytes(k, text, strlen(text), error);
    free(text);
    json_decref(file);
    return ok;
}

static Tokenizer open_file(json_t* file) {
    Tokenizer k;
    ErrorText error;
    if (!parse_file(&k, file, &error)) { fail_run("test: %s", error.text); }
    return k;
}

// "1 2 3": what is expected of ids reads best as a text
static void check_ids(Test* t, const Tokenizer* k, const char* text, int choices, const char* expected) {
    char found[4096] = "";
    size_t used = 0;
    TokenizerWork w;
    char* exact = (char*)heap_copy(text, strlen(text));
    tokenizer_work_init(&w, k, strlen(text));
    int n = tokenizer_encode_with(k, &w, exact, strlen(text), choices);
    for (int i = 0; i < n && used < 4000; i++) {
        used += (size_t)sprintf(found + used, i > 0 ? " %d" : "%d", w.tokens[i]);
    }
    check(t, strcmp(found, expected) == 0, "\"%s\": expected %s, found %s", text, expected, found);
    tokenizer_work_free(&w);
    free(exact);
}

static void check_text(Test* t, const Tokenizer* k, const int* ids, int n, int skip_special, const char* expected) {
    size_t n_bytes;
    char* text = tokenizer_decode_with(k, ids, n, skip_special, &n_bytes);
    check(t, strcmp(text, expected) == 0 && n_bytes == strlen(expected), "expected \"%s\", found \"%s\"", expected,
          text);
    free(text);
}

static const int usual = TOKENIZER_TEMPLATE | TOKENIZER_ADDED;

// ---- Unicode ----

static void check_repair(Test* t, const char* bytes, const char* expected) {
    ByteBuffer out = {NULL, 0, 0};
    unsigned char* exact = heap_copy(bytes, strlen(bytes));
    utf8_repair(&out, exact, strlen(bytes));
    buffer_append(&out, "", 1);
    check(t, strcmp((const char*)out.bytes, expected) == 0, "\"%s\" became \"%s\", expected \"%s\"", bytes,
          (const char*)out.bytes, expected);
    buffer_free(&out);
    free(exact);
}

// expectations: Python's bytes.decode("utf-8", errors="replace")
static void test_repair(Test* t) {
#define R "\xef\xbf\xbd"
    check_repair(t, "plain ASCII, more than eight", "plain ASCII, more than eight");
    check_repair(t, "a\x80" "b", "a" R "b");
    check_repair(t, "\xc3\xa9\xc3", "\xc3\xa9" R);
    check_repair(t, "\xf0\x9f\x98" "a", R "a");                // one for what a character began with
    check_repair(t, "\xf0\x9f\x98\x80\xf0\x9f", "\xf0\x9f\x98\x80" R);
    check_repair(t, "\xed\xa0\x80", R R R);                    // a surrogate: no beginning of anything
    check_repair(t, "\xc0\xaf\xe0\x80\xaf", R R R R R);        // overlong
    check_repair(t, "\xf4\x90\x80\x80\xf5\xff", R R R R R R);  // above U+10FFFF
    unsigned char out[4];
    for (uint32_t code = 0; code < UNICODE_CODES; code++) {
        uint32_t back, again;
        int cut, n = utf8_put(out, code), surrogate = code >= 0xd800 && code < 0xe000;
        int valid = utf8_decode(out, (size_t)n, &back, &cut) == n && back == code && utf8_next(out, &again) == n &&
                    again == code;
        if (valid == surrogate) {
            check(t, 0, "U+%04X: %s", code, surrogate ? "a surrogate, accepted" : "not what was written");
        }
    }
}

static void test_classes(Test* t) {
    const struct { int flag, n; const char* name; } expected[] = {
        {UNICODE_LETTER, 141028, "letters"}, {UNICODE_NUMBER, 1911, "numbers"}, {UNICODE_MARK, 2501, "marks"},
        {UNICODE_SPACE, 25, "white space"}, {UNICODE_WORD, 144667, "word"}};
    Unicode u;
    unicode_init(&u);
    for (int i = 0; i < 5; i++) {
        int n = 0;
        for (uint32_t code = 0; code < UNICODE_CODES; code++) { n += (u.flags[code] & expected[i].flag) != 0; }
        check(t, n == expected[i].n, "%s: %d characters, Unicode 16.0 has %d", expected[i].name, n, expected[i].n);
    }
    check(t, !(u.flags[0x180e] & UNICODE_SPACE) && !(u.flags[0x200b] & UNICODE_SPACE),
          "U+180E and U+200B are no white space");
    unicode_free(&u);
}

static void check_nfc(Test* t, const Unicode* u, const char* text, const char* expected) {
    ByteBuffer out = {NULL, 0, 0}, twice = {NULL, 0, 0};
    unsigned char* exact = heap_copy(text, strlen(text));
    nfc_append(&out, u, exact, strlen(text));
    nfc_append(&twice, u, out.bytes, out.n);
    check(t, out.n == strlen(expected) && memcmp(out.bytes, expected, out.n) == 0, "\"%s\": \"%.*s\", expected \"%s\"",
          text, (int)out.n, (const char*)out.bytes, expected);
    check(t, twice.n == out.n && memcmp(twice.bytes, out.bytes, out.n) == 0, "\"%s\": NFC of NFC differs", text);
    buffer_free(&out);
    buffer_free(&twice);
    free(exact);
}

static void test_nfc(Test* t) {
    Unicode u;
    unicode_init(&u);
    check_nfc(t, &u, "plain", "plain");
    check_nfc(t, &u, "xe\xcc\x81y", "x\xc3\xa9y");                                    // e and acute: é
    // dot above, dot below: sorted, then joined twice
    check_nfc(t, &u, "s\xcc\x87\xcc\xa3", "\xe1\xb9\xa9");
    check_nfc(t, &u, "\xe1\xb9\xa3\xcc\x87", "\xe1\xb9\xa9");                         // the first character joins too
    check_nfc(t, &u, "\xcc\x81" "a", "\xcc\x81" "a");                                 // a mark with nothing before it
    // Angstrom, Ohm: single characters
    check_nfc(t, &u, "\xe2\x84\xab\xe2\x84\xa6", "\xc3\x85\xce\xa9");
    // U+0958: excluded from composition
    check_nfc(t, &u, "\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc");
    check_nfc(t, &u, "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81");         // Hangul L, V, T
    check_nfc(t, &u, "\xea\xb0\x80\xe1\x86\xa8", "\xea\xb0\x81");                     // LV, T
    check_nfc(t, &u, "a\xcc\xa3" "b\xcc\x81\xcc\xa3", "\xe1\xba\xa1" "\xe1\xb8\x85\xcc\x81");
    // U+11938 came after Unicode 9
    check_nfc(t, &u, "\xf0\x91\xa4\xb5\xf0\x91\xa4\xb0", "\xf0\x91\xa4\xb5\xf0\x91\xa4\xb0");
    // U+1E8D0 below (220) and dot below: in order
    check_nfc(t, &u, "a\xf0\x9e\xa3\x90\xcc\xa3", "a\xf0\x9e\xa3\x90\xcc\xa3");
    size_t n = 1000000;
    ByteBuffer marks = {NULL, 0, 0}, out = {NULL, 0, 0};
    buffer_append(&marks, "a", 1);
    for (size_t i = 0; i < n; i++) { buffer_append(&marks, i % 2 ? "\xcc\xa3" : "\xcc\x81", 2); }
    nfc_append(&out, &u, marks.bytes, marks.n);  // a and one dot below join: quadratic sorting would not come back
    check(t, out.n == 3 + 2 * (n - 1) && memcmp(out.bytes, "\xe1\xba\xa1\xcc\xa3", 5) == 0,
          "a million marks: %zu bytes", out.n);
    buffer_free(&marks);
    buffer_free(&out);
    unicode_free(&u);
}

// ---- words ----

// the words of a text with a bar between them
static void check_words(Test* t, const char* regex, const char* text, const char* expected) {
    Unicode u;
    Splitter splitter;
    ErrorText error;
    ByteBuffer out = {NULL, 0, 0};
    size_t n = strlen(text), match_end = 0;
    RegexWork work;
    regex_work_init(&work);
    unicode_init(&u);
    if (!splitter_parse_(&splitter, regex, &error)) { fail_run("test: %s", error.text); }
    for (size_t at = 0, end; at < n; at = end) {
        end = word_end(&splitter, &u, &work, (const unsigned char*)text, n, at, &match_end);
        buffer_append(&out, "|", at > 0);
        buffer_append(&out, text + at, end - at);
    }
    buffer_append(&out, "", 1);
    check(t, strcmp((const char*)out.bytes, expected) == 0, "\"%s\": found %s, expected %s", text,
          (const char*)out.bytes, expected);
    buffer_free(&out);
    regex_work_free(&work);
    pcre2_code_free(splitter.regex);
    unicode_free(&u);
}

static void test_words(Test* t) {
    check_words(t, QWEN2_REGEX, "Hello world's 123  tests\n\n  x", "Hello| world|'s| |1|2|3| | tests|\n\n| | x");
    check_words(t, QWEN2_REGEX, "a'b I'LL foo(bar)", "a|'b| I|'LL| foo|(bar|)");
    check_words(t, QWEN2_REGEX, "x = 1;\n", "x| =| |1|;\n");
    check_words(t, QWEN2_REGEX, "\t\tif  \n \n x", "\t|\tif|  \n \n| x");
    check_words(t, QWEN2_REGEX, "!!!\n\ny a  ", "!!!\n\n|y| a|  ");
    check_words(t, QWEN2_REGEX, "'\xc5\xbf' x", "'\xc5\xbf|'| x");          // long s is an s without case
    check_words(t, QWEN2_REGEX, "\xe1\xa0\x8e x", "\xe1\xa0\x8e| x");        // U+180E is no white space
    check_words(t, QWEN2_REGEX, "e\xcc\x81" "a", "e|\xcc\x81" "a");          // a mark is no letter to Qwen2,
    check_words(t, QWEN35_REGEX, "e\xcc\x81" "a", "e\xcc\x81" "a");          // but is to Qwen3.5
    check_words(t, LLAMA3_REGEX, "12345 6", "123|45| |6");
    check_words(t, GPT2_REGEX, "Hello world's  123 I'LL\n\n x  ", "Hello| world|'s| | 123| I|'|LL|\n\n| x|  ");
    // matches and the gaps between them
    check_words(t, "\\d+|[^\\S\\n]+", "ab12 \n x\xe1\xa0\x8e", "ab|12| |\n| |x\xe1\xa0\x8e");
}

// a text of pieces that meet at the edges of the expressions
static size_t random_text(char* text, size_t room, uint64_t* seed) {
    const char* pieces[] = {" ", "  ", "\n", "\r", "\t", "'", "s", "S", "re", "LL", "x", "the", "1", "23", ".", "!?",
                            "_", "\xc2\xa0", "\xe2\x80\xa8",
                            "\xc3\xa9", "e\xcc\x81", "\xcc\xa3", "\xe4\xb8\xad\xe6\x96\x87", "\xf0\x9f\x98\x80",
                            "\xc2\xb2", "\xd9\xa3", "\xc5\xbf",
                            "\xe1\xa0\x8e", "▁", "<|endoftext|>", "<x>", "</s>", "ab", "abc", "h", "e", "\x01"};
    size_t n = 0, n_pieces = sizeof pieces / sizeof pieces[0];
    for (uint32_t i = xorshift_u32(seed) % 24; i > 0; i--) {
        const char* piece = pieces[xorshift_u32(seed) % n_pieces];
        if (n + strlen(piece) + 1 > room) { break; }
        memcpy(text + n, piece, strlen(piece));
        n += strlen(piece);
    }
    text[n] = '\0';
    return n;
}

static void test_matchers(Test* t) {
    const char* regexes[] = {GPT2_REGEX, QWEN2_REGEX, QWEN35_REGEX, LLAMA3_REGEX};
    Unicode u;
    ErrorText error;
    RegexWork work;
    regex_work_init(&work);
    uint64_t seed = seeded_stream(7);
    unicode_init(&u);
    for (int r = 0; r < 4; r++) {
        Splitter ours, theirs;
        memset(&theirs, 0, sizeof theirs);
        theirs.kind = SPLIT_REGEX;
        if (!splitter_parse_(&ours, regexes[r], &error) || !splitter_compile_(&theirs, regexes[r], &error)) {
            fail_run("test: %s", error.text);
        }
        check(t, ours.regex == NULL, "expression %d has a matcher of its own", r);
        for (int i = 0; i < 20000; i++) {
            char text[256];
            size_t n = random_text(text, sizeof text, &seed), match_end = 0;
            for (size_t at = 0, end; at < n; at = end) {
                end = word_end(&ours, &u, &work, (const unsigned char*)text, n, at, &match_end);
                size_t want = word_end(&theirs, &u, &work, (const unsigned char*)text, n, at, &match_end);
                if (!check(t, end == want, "\"%s\" at %zu: a word to %zu, PCRE2 has %zu", text, at, end, want)) {
                    break;
                }
            }
        }
        pcre2_code_free(theirs.regex);
    }
    regex_work_free(&work);
    unicode_free(&u);
}

// ---- merges ----

// the rule itself: the lowest rank of all neighbours, the leftmost of equals, until there is none
static size_t merge_plainly(const BpeTable* table, int32_t* ids, size_t n) {
    for (;;) {
        uint64_t lowest = BPE_NO_MERGE;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            uint64_t merged = bpe_find_(table, ids[i], ids[i + 1]);
            if (merged < lowest) { lowest = merged; at = i; }
        }
        if (lowest == BPE_NO_MERGE) { return n; }
        ids[at] = (int32_t)(uint32_t)lowest;
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof(int32_t));
        n--;
    }
}

static void test_merges(Test* t) {
    uint64_t seed = seeded_stream(3);
    for (int round = 0; round < 300; round++) {
        BpeTable table;
        BpeWork w;
        int n_tokens = 2 + (int)(xorshift_u32(&seed) % 4), n_symbols = n_tokens;
        bpe_table_init(&table, 40);
        bpe_work_init(&w, 1);
        for (int i = 0; i < 40; i++) {
            int left = (int)(xorshift_u32(&seed) % (uint32_t)n_tokens),
                right = (int)(xorshift_u32(&seed) % (uint32_t)n_tokens);
            n_tokens += bpe_table_add(&table, left, right, n_tokens);
        }
        for (int i = 0; i < 50; i++) {
            int32_t plain[200], brief[200], heap[200];
            size_t n = 1 + xorshift_u32(&seed) % (i % 2 ? 200 : BPE_SHORT);
            for (size_t j = 0; j < n; j++) {
                plain[j] = brief[j] = heap[j] = (int32_t)(xorshift_u32(&seed) % (uint32_t)n_symbols);
            }
            size_t n_plain = merge_plainly(&table, plain, n), n_brief = bpe_merge(&table, &w, brief, n),
                   n_heap = bpe_merge_long_(&table, &w, heap, n);
            check(t, n_brief == n_plain && memcmp(brief, plain, n_plain * 4) == 0,
                  "bpe_merge: %zu symbols become other tokens", n);
            check(t, n_heap == n_plain && memcmp(heap, plain, n_plain * 4) == 0,
                  "the heap: %zu symbols become other tokens", n);
        }
        bpe_work_free(&w);
        free(table.slots);
    }
}

// ---- whole tokenizers ----

static void test_byte_level(Test* t) {
    Tokenizer k = open_file(byte_level_file());
    check(t, k.n_tokens == 263 && k.eot == 261 && strcmp(k.kind, "tokenizer.json") == 0, "%d tokens, end of text %d",
          k.n_tokens, k.eot);
    check_ids(t, &k, "", usual, "");
    check_ids(t, &k, "the the", usual, "116 257 258");
    check_ids(t, &k, "ababab", usual, "260 259");
    check_ids(t, &k, "a<|endoftext|> the", usual, "97 261 258");
    check_ids(t, &k, "a<x>", TOKENIZER_TEMPLATE, "97 60 120 62");  // plain text
    check_ids(t, &k, "e\xcc\x81", usual, "195 169");               // NFC
    check_ids(t, &k, "\xff", usual, "239 191 189");                // U+FFFD
    tokenizer_free(&k);
    json_t* file = byte_level_file();
    edit(file, "pre_tokenizer", "{\"type\": \"ByteLevel\", \"add_prefix_space\": true}");
    k = open_file(file);
    check_ids(t, &k, "the<x>he", usual, "258 262 32 257");  // a blank before every piece
    tokenizer_free(&k);
    file = byte_level_file();
    edit(file, "model.ignore_merges", "true");
    edit(file, "model.vocab.xyz", "261");
    edit(file, "added_tokens", "[]");
    k = open_file(file);
    check_ids(t, &k, "xyz xyz", usual, "261 32 120 121 122");
    check(t, k.eot == -1, "no end of text: %d", k.eot);
    tokenizer_free(&k);
    // Llama 3, DeepSeek, ...
    const char* names[] = {"<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|im_end|>"};
    for (int i = 0; i < 5; i++) {
        char content[64];
        snprintf(content, sizeof content, "\"%s\"", names[i]);
        file = byte_level_file();
        edit(file, "added_tokens.0.content", content);
        k = open_file(file);
        check(t, k.eot == 261, "%s: end of text is %d", names[i], k.eot);
        tokenizer_free(&k);
    }
}

static void test_characters(Test* t) {
    Tokenizer k = open_file(character_file());
    check(t, k.n_tokens == 266 && k.eot == 2, "%d tokens, end of text %d", k.n_tokens, k.eot);
    check_ids(t, &k, "abc", usual, "1 265");
    check_ids(t, &k, " abc bc", usual, "1 259 265 259 264");  // a text that begins with a blank gets two
    check_ids(t, &k, "a</s>a", usual, "1 263 2 263");          // every piece its own
    check_ids(t, &k, "\xc3\xa9", usual, "1 259 198 172");      // bytes of a character that is no token
    check_ids(t, &k, "a", TOKENIZER_ADDED, "263");             // without template
    check_ids(t, &k, "", usual, "1");
    tokenizer_free(&k);
    const char* first =
        "{\"type\": \"Metaspace\", \"replacement\": \"▁\", \"prepend_scheme\": \"first\", \"split\": false}";
    json_t* file = character_file();
    edit(file, "normalizer", "null");
    edit(file, "pre_tokenizer", first);
    k = open_file(file);
    check_ids(t, &k, " a", usual, "1 263");
    check_ids(t, &k, "a</s>b", usual, "1 263 2 261");
    check_ids(t, &k, "</s>a", usual, "1 2 260");
    tokenizer_free(&k);
    file = character_file();  // a merge across a blank that the split keeps from being made, wherever the blank stands
    edit(file, "normalizer", "null");
    edit(file, "pre_tokenizer",
         "{\"type\": \"Metaspace\", \"replacement\": \"▁\", \"prepend_scheme\": \"never\", \"split\": true}");
    edit(file, "model.vocab.c▁", "266");
    edit(file, "model.merges", "[[\"c\", \"▁\"]]");
    k = open_file(file);
    check_ids(t, &k, "c bc", usual, "1 262 259 261 262");
    check_ids(t, &k, "bc  c", usual, "1 261 262 259 259 262");
    check_ids(t, &k, "cbbc c ", usual, "1 262 261 261 262 259 262 259");
    tokenizer_free(&k);
    for (int fuse = 0; fuse < 2; fuse++) {
        file = character_file();
        edit(file, "model.byte_fallback", "false");
        edit(file, "model.fuse_unk", fuse ? "true" : "false");
        k = open_file(file);
        check_ids(t, &k, "axyzb", usual, fuse ? "1 263 0 261" : "1 263 0 0 0 261");
        tokenizer_free(&k);
    }
}

// a merge across a blank: words may not be cut there
static void test_merge_across_words(Test* t) {
    json_t* file = character_file();
    edit(file, "model.vocab.c▁", "266");
    edit(file, "model.merges.0", "\"c ▁\"");
    Tokenizer k = open_file(file);
    check(t, !k.pipeline->cut_before_marker, "cut, though a token reaches across");
    check_ids(t, &k, "c a", usual, "1 259 266 260");
    tokenizer_free(&k);
    file = character_file();
    edit(file, "model.vocab.▁▁", "266");
    edit(file, "model.merges.0", "\"▁ ▁\"");
    k = open_file(file);
    check(t, k.pipeline->cut_before_marker, "not cut, though a token of blanks reaches no further");
    check_ids(t, &k, "a  a", usual, "1 259 260 266 260");  // the two blanks stay together
    tokenizer_free(&k);
    k = open_file(character_file());
    check(t, k.pipeline->cut_before_marker, "not cut, though no token reaches across");
    tokenizer_free(&k);
}

static void test_added_tokens(Test* t) {
    const struct { const char *fields, *text, *ids; } cases[] = {
        {"\"content\": \"<y>\", \"lstrip\": true", "a \n<y> b", "97 263 32 98"},
        {"\"content\": \"<y>\", \"rstrip\": true", "a <y> \n b", "97 32 263 98"},
        {"\"content\": \"y_\", \"single_word\": true", "y_ xy_ y_z y_", "263 32 120 121 95 32 121 95 122 32 263"},
        // the longest
        {"\"content\": \"<x>y\", \"normalized\": false", "<x>y <x> y", "263 32 262 32 121"},
        // normalised too
        {"\"content\": \"e\\u0301\", \"normalized\": true", "\xc3\xa9 e\xcc\x81", "263 32 263"},
        {"\"content\": \"e\\u0301\", \"normalized\": false", "\xc3\xa9 e\xcc\x81", "195 169 32 263"},
        // parts words
        {"\"content\": \"ba\", \"normalized\": false", "abab", "97 263 98"},
        // swallowed, and found again
        {"\"content\": \" \", \"rstrip\": true, \"normalized\": false", "a  b", "97 263 263 98"},
        // swallowed: nothing is left
        {"\"content\": \" \", \"rstrip\": true, \"lstrip\": true, \"normalized\": false", "a  b ", "97 263 98 263"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char token[200];
        json_t* file = byte_level_file();
        snprintf(token, sizeof token, "{\"id\": 263, %s}", cases[i].fields);
        edit(file, "added_tokens.2", token);
        Tokenizer k = open_file(file);
        check_ids(t, &k, cases[i].text, usual, cases[i].ids);
        tokenizer_free(&k);
    }
}

static void test_splits(Test* t) {
    json_t* file = byte_level_file();
    edit(file, "pre_tokenizer.pretokenizers.0",
         "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"h\"}, \"behavior\": \"Isolated\"}");
    Tokenizer k = open_file(file);
    check_ids(t, &k, "thehe ab", usual, "116 104 101 104 101 32 259");  // "he" is never seen together
    tokenizer_free(&k);
    file = byte_level_file();  // a group that repeats needs more than the 32 KiB of PCRE2's compiled code
    edit(file, "pre_tokenizer.pretokenizers.0",
         "{\"type\": \"Split\", \"pattern\": {\"Regex\": \"(?:[a-z] ?)+|.\"}, \"behavior\": \"Isolated\"}");
    k = open_file(file);
    const int n = 100000;
    char* text = (char*)memset(malloc_check((size_t)n, "text"), 'x', (size_t)n);
    int* tokens;
    check(t, tokenizer_encode_plain(&k, text, (size_t)n, &tokens) == n, "a long match of a group");
    free(tokens);
    free(text);
    tokenizer_free(&k);
}

// the same text through one workspace, through new ones, and cut at added tokens
static void test_workspace(Test* t) {
    json_t* files[] = {byte_level_file(), character_file()};
    uint64_t seed = seeded_stream(11);
    for (int f = 0; f < 2; f++) {
        Tokenizer k = open_file(files[f]);
        TokenizerWork w;
        tokenizer_work_init(&w, &k, 100);
        for (int i = 0; i < 3000; i++) {
            char text[256];
            int *tokens, n_text = (int)random_text(text, sizeof text, &seed),
                         n = tokenizer_encode(&k, text, (size_t)n_text, &tokens);
            int same = tokenizer_encode_with(&k, &w, text, (size_t)n_text, usual) == n &&
                       (n == 0 || memcmp(tokens, w.tokens, (size_t)n * sizeof(int)) == 0);
            check(t, same, "\"%s\": other tokens with a used workspace", text);
            free(tokens);
        }
        tokenizer_work_free(&w);
        tokenizer_free(&k);
    }
}

// ten million bytes without a place to cut: n log n, or the suite would stand still
static void test_long_words(Test* t) {
    Tokenizer k = open_file(byte_level_file());
    size_t n_bytes = 4000000;
    char* text = (char*)malloc_check(n_bytes, "text of a test");
    int* tokens;
    for (size_t i = 0; i < n_bytes; i++) { text[i] = i % 2 ? 'b' : 'a'; }
    int n = tokenizer_encode(&k, text, n_bytes, &tokens), wrong = 0;
    for (int i = 0; i < n; i++) { wrong += tokens[i] != 260; }
    check(t, n == (int)n_bytes / 4 && wrong == 0, "%d tokens, %d of them not abab", n, wrong);
    free(tokens);
    memset(text, ' ', n_bytes);
    n = tokenizer_encode(&k, text, n_bytes, &tokens);
    check(t, n == (int)n_bytes && tokens[n - 1] == ' ', "%d tokens of blanks", n);
    free(tokens);
    free(text);
    tokenizer_free(&k);
}

// ---- decoding ----

static void test_decode(Test* t) {
    const int bytes[] = {258, 261, 195, 169, 195, 240, 159, 152, 120, 400, -1}, runs[] = {1, 263, 198, 172, 198, 260,
                                                                                          198, 172, 3 + 255, 259, 2};
    Tokenizer k = open_file(byte_level_file());
    check_text(t, &k, bytes, 11, 0, " the<|endoftext|>\xc3\xa9" R R "x");
    check_text(t, &k, bytes, 11, 1, " the\xc3\xa9" R R "x");
    check_text(t, &k, bytes + 4, 1, 0, R);
    check_text(t, &k, bytes, 0, 0, "");
    tokenizer_free(&k);
    k = open_file(character_file());
    check_text(t, &k, runs, 11, 0, "<s> a" R R R "a" R R R " </s>");  // a run of bytes is text as a whole or not at all
    check_text(t, &k, runs + 1, 3, 0, "a\xc3\xa9");                    // one blank less in front
    check_text(t, &k, runs, 2, 1, "a");
    tokenizer_free(&k);
    json_t* file = byte_level_file();
    edit(file, "decoder", "null");
    k = open_file(file);
    // without a decoder: the tokens with blanks between them
    check_text(t, &k, bytes, 2, 0, "\xc4\xa0the <|endoftext|>");
    tokenizer_free(&k);
}

// whatever the ids, the pieces of a stream make the whole, and none ends inside a character
static void test_stream(Test* t) {
    json_t* files[] = {byte_level_file(), character_file()};
    uint64_t seed = seeded_stream(5);
    for (int f = 0; f < 2; f++) {
        Tokenizer k = open_file(files[f]);
        for (int i = 0; i < 3000; i++) {
            int ids[20], n = (int)(xorshift_u32(&seed) % 20), skip_special = i % 2;
            size_t n_whole, n_more;
            TokenStream stream;
            ByteBuffer text = {NULL, 0, 0};
            for (int j = 0; j < n; j++) { ids[j] = (int)(xorshift_u32(&seed) % 280); }
            token_stream_init(&stream, &k, skip_special);
            for (int j = 0; j <= n; j++) {
                const char* more = j < n ? token_stream_put(&stream, ids[j], &n_more)
                                         : token_stream_end(&stream, &n_more);
                check(t, utf8_valid_prefix((const unsigned char*)more, n_more) == n_more, "a piece that is no UTF-8");
                buffer_append(&text, more, n_more);
            }
            char* whole = tokenizer_decode_with(&k, ids, n, skip_special, &n_whole);
            check(t, n_whole == text.n && (n_whole == 0 || memcmp(whole, text.bytes, n_whole) == 0),
                  "the pieces are not the whole");
            free(whole);
            buffer_free(&text);
            token_stream_free(&stream);
        }
        tokenizer_free(&k);
    }
    Tokenizer k = open_file(byte_level_file());
    TokenStream stream;
    size_t n;
    token_stream_init(&stream, &k, 0);
    token_stream_put(&stream, 0xe4, &n);
    check(t, n == 0, "half a character: %zu bytes", n);
    token_stream_put(&stream, 0xb8, &n);
    check(t, n == 0, "two thirds of a character: %zu bytes", n);
    check(t, memcmp(token_stream_put(&stream, 0xad, &n), "\xe4\xb8\xad", 3) == 0 && n == 3, "a character: %zu bytes",
          n);
    check(t, memcmp(token_stream_put(&stream, 'a', &n), "a", 1) == 0 && n == 1, "a letter: %zu bytes", n);
    token_stream_free(&stream);
    tokenizer_free(&k);

    // a prompt that ends in byte tokens, which are text only when their run is over
    k = open_file(character_file());
    int *ids, n_ids = tokenizer_encode_plain(&k, "\xf0\x9f\x91\x8d", 4, &ids);
    token_stream_init(&stream, &k, 0);
    for (int i = 0; i < n_ids; i++) { token_stream_put(&stream, ids[i], &n); }
    check(t, stream.held.n == 4, "the prompt is not held: %zu bytes", stream.held.n);
    token_stream_after_prompt(&stream);
    for (int i = 0; i < n_ids; i++) { token_stream_put(&stream, ids[i], &n); }
    token_stream_end(&stream, &n);
    check(t, n == 4, "behind the prompt: %zu bytes, expected the 4 that came after it", n);
    token_stream_free(&stream);
    tokenizer_free(&k);
    free(ids);
}

static void test_print_safe(Test* t) {
    char printed[64] = "";
    FILE* out = fmemopen(printed, sizeof printed, "w");
    text_print_safe("a\x1b[2J\x07\n\t\xc2\x9b" "b\xc3\xa9\x7f\xc2", 15, out);
    fclose(out);
    check(t, strcmp(printed, "a[2J\n\tb\xc3\xa9\xc2") == 0, "printed \"%s\"", printed);
    SafeText safe = {fmemopen(printed, sizeof printed, "w"), 0};
    for (const char* s = "\xc2\x9b\xc2\xc2\x9b\xc2\xa9\xc2" "a\x9b\xc2"; *s; s++) { text_print_safe_piece(&safe, s, 1); }
    text_print_safe_end(&safe);
    fclose(safe.out);
    check(t, strcmp(printed, "\xc2\xc2\xa9\xc2" "a\x9b\xc2") == 0, "byte by byte: printed \"%s\"", printed);
}

// ---- files ----

static void open_and_need_eot(void* path) {
    Tokenizer k;
    tokenizer_open(&k, (const char*)path);
    tokenizer_need_eot(&k);
    tokenizer_free(&k);
}

static void test_open(Test* t) {
    TempPath folder = temp_folder();
    json_t* file = byte_level_file();
    char* text = json_dumps(file, JSON_INDENT(2));
    temp_file(&folder, "model/tokenizer.json", text, strlen(text));
    TempPath path = temp_file(&folder, "other.txt", text, strlen(text)), model = temp_path(&folder, "model"),
             empty = temp_path(&folder, "none/x");
    Tokenizer k;
    tokenizer_open(&k, path.s);
    check(t, k.eot == 261, "a file, told by its content");
    tokenizer_free(&k);
    tokenizer_open(&k, model.s);
    check(t, k.eot == 261, "a folder");
    tokenizer_free(&k);
    free(text);
    edit(file, "truncation", "{\"max_length\": 512}");
    edit(file, "padding", "null");
    k = open_file(json_deep_copy(file));
    check(t, k.pipeline->left_out && strcmp(k.pipeline->left_out, "truncation") == 0,
          "truncation is named for a warning");
    tokenizer_free(&k);
    edit(file, "truncation", "-");
    k = open_file(json_deep_copy(file));
    check(t, !k.pipeline->left_out, "a file without it gives none");
    tokenizer_free(&k);
    edit(file, "added_tokens", "[]");
    text = json_dumps(file, JSON_COMPACT);
    path = temp_file(&folder, "no_eot.json", text, strlen(text));
    check_exit(t, "no end of text", open_and_need_eot, path.s, 2,
               "the tokenizer has no end of text: expected <|endoftext|>, <|end_of_text|>, </s>");
    path = temp_file(&folder, "config.json", "{\"vocab_size\": 5}", 17);
    check_exit(t, "another JSON file", open_and_need_eot, path.s, 2,
               "config.json: expected an object as \"model\", found nothing");
    *strrchr(empty.s, '/') = '\0';
    check_exit(t, "a folder without", open_and_need_eot, empty.s, 2,
               "none/tokenizer.json: cannot be opened: No such file");
    path = temp_file(&folder, "page.json", "<!doctype html>", 15);
    check_exit(t, "a web page", open_and_need_eot, path.s, 2, "found an HTML page");
    free(text);
    json_decref(file);
    temp_remove(&folder);
}

// each file is one of the two above with one place changed: 0 bytes, 1 characters, 2 bytes without added tokens
static void test_broken_files(Test* t) {
    const struct { int kind; const char *path, *value, *expected;
    } cases[] = {
        {0, "model", "-", "expected an object as \"model\", found nothing"},
        {0, "model", "[]", "expected an object as \"model\", found a list"},
        {0, "model.type", "\"WordPiece\"", "model: expected BPE, found \"WordPiece\", which is not implemented"},
        {0, "model.vocab", "[]", "as \"vocab\", found a list"},
        {0, "model.vocab", "{}", "as \"vocab\""},
        {2, "model.vocab.abab", "-", "merges[4]: \"abab\" is not in the vocabulary"},
        {2, "model.vocab.!", "-", "vocab: expected a token for each of the 256 bytes, found none for 0x21"},
        {0, "model.vocab.a", "\"1\"", "vocab: \"a\": expected an integer as id, found a text"},
        {0, "model.vocab.a", "1.5", "expected an integer as id, found a number"},
        {0, "model.vocab.a", "-1", "vocab: \"a\": expected an id 0.."},
        {0, "model.vocab.a", "98", "vocab: id 98 belongs to"},
        {0, "model.vocab.a", "2147483648", "bytes, found 2147483648"},
        {0, "model.vocab.a", "9223372036854775807", "bytes, found 9223372036854775807"},
        {0, "model.vocab", "{\"\": 0}", "vocab: id 0: expected a text, found an empty one"},
        {0, "model.merges", "{}", "as \"merges\", found an object"},
        {0, "model.merges.0", "7", "merges[0]: expected \"a b\" or [\"a\", \"b\"], found an integer"},
        {0, "model.merges.0", "[\"a\"]", "merges[0]: expected \"a b\" or [\"a\", \"b\"], found a list"},
        {0, "model.merges.0", "\"ab\"", "merges[0]: expected two tokens with one blank between them, found \"ab\""},
        {0, "model.merges.0", "\"a b c\"",
         "merges[0]: expected two tokens with one blank between them, found \"a b c\""},
        {0, "model.merges.1", "\"q zz\"", "merges[1]: \"zz\" is not in the vocabulary"},
        {0, "model.merges.1", "\"q z\"", "merges[1]: \"qz\" is not in the vocabulary"},
        {0, "model.merges.5", "[\"a\", \"b\"]", "merges[5]: this pair, which gives \"ab\", stands in the list before"},
        {0, "model.dropout", "0.1", "expected dropout null or 0, found a number"},
        {0, "model.byte_fallback", "1", "expected true or false as \"byte_fallback\", found an integer"},
        {0, "model.unk_token", "{}", "expected a text as \"unk_token\", found an object"},
        {0, "model.end_of_word_suffix", "\"</w>\"", "found \"\" and \"</w>\", which are not implemented"},
        {0, "added_tokens", "{}", "added_tokens: expected a list, found an object"},
        {0, "added_tokens.0", "[]", "added_tokens: expected a text as \"content\", found nothing"},
        {0, "added_tokens.0.content", "\"\"", "added_tokens: id 261: expected 1..4096 bytes of content, found 0"},
        {0, "added_tokens.0.id", "-", "added_tokens: \"<|endoftext|>\": expected an integer as id, found nothing"},
        {0, "added_tokens.0.id", "5000000000", "bytes, found 5000000000"},
        {0, "added_tokens.0.id", "300", "expected id 261, the next after the vocabulary, found 300"},
        {0, "model.vocab.abab", "261",
         "found 261, which is \"abab\": the ids of the vocabulary's 261 tokens must be 0..260"},
        {0, "padding", "{}", NULL},
        {0, "added_tokens.1.content", "\"<|endoftext|>\"",
         "added_tokens: \"<|endoftext|>\": expected a text of its own, found it twice"},
        {0, "added_tokens.0.special", "\"yes\"", "expected true or false as \"special\", found a text"},
        {0, "normalizer", "[]", "normalizer: expected an object or null, found a list"},
        {0, "normalizer.type", "\"NFKC\"",
         "normalizer: expected NFC, Prepend or Replace, found \"NFKC\", which is not implemented"},
        {0, "normalizer", "{\"type\": \"Sequence\"}",
         "normalizer: Sequence: expected a list as \"normalizers\", found nothing"},
        {0, "normalizer", "{\"type\": \"Replace\", \"pattern\": {\"Regex\": \"a\"}, \"content\": \"\"}",
         "expected a text as \"String\", found nothing"},
        {0, "normalizer", "{\"type\": \"Replace\", \"pattern\": {\"String\": \"\"}, \"content\": \"\"}",
         "expected a pattern of 1..4096 bytes, found 0"},
        {0, "normalizer", "{\"type\": \"Replace\", \"pattern\": {\"String\": \"<|endoftext|>\"}, \"content\": \"\"}",
         NULL},
        {0, "normalizer",
         "{\"type\": \"Prepend\", \"prepend\": "
         "\"0123456789012345678901234567890123456789012345678901234567890123456789\"}",
         "make a text at most 16 times longer, found 70 times"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a(\"",
         "pre_tokenizer: regex: missing closing parenthesis: a("},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a*\"", "regex: it matches nothing at all"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"\\\\w+\"",
         "regex: this escape at offset 0 is not implemented"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"\\\\p{Han}\"",
         "regex: this escape at offset 0 is not implemented"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"[a&&b]\"", "regex: a class inside a class at offset 2"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"^a\"", "regex: an anchor at offset 0"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(?#a)\"", "regex: this kind of group at offset 0"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a{2}+\"", "regex: this count at offset 1"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a{,2}b\"",
         "regex: this count at offset 1"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a{2}?b\"",
         "regex: this count at offset 1"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a{2, 3}\"",
         "regex: this count at offset 1"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"a(*SKIP)\"",
         "regex: a verb at offset 1"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(*UTF)a\"",
         "regex: a verb at offset 0"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(?i:a|s(?:s))\"",
         "regex: ss, ff, fi, fl or st without regard to case at offset 10"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(?i:Fi)\"",
         "regex: ss, ff, fi, fl or st without regard to case at offset 5"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(?i:[ß])\"",
         "regex: a letter beyond ASCII without regard to case at offset 5"},
        {0, "pre_tokenizer.pretokenizers.0.pattern.Regex", "\"(?i:\\\\p{Lu})\"",
         "regex: a class of Unicode without regard to case at offset 4"},
        {0, "pre_tokenizer.pretokenizers.0.behavior", "\"Removed\"",
         "found \"Removed\" and false, which is not implemented"},
        {0, "pre_tokenizer.pretokenizers.0.type", "\"Whitespace\"",
         "pre_tokenizer: expected Split, ByteLevel or Metaspace alone, found \"Whitespace\""},
        {0, "pre_tokenizer.pretokenizers.0", "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}",
         "expected nothing after ByteLevel or Metaspace"},
        {0, "pre_tokenizer.pretokenizers.1.add_prefix_space", "true",
         "add_prefix_space after a Split is not implemented"},
        {0, "pre_tokenizer", "{\"type\": \"Metaspace\", \"replacement\": \"xy\"}",
         "expected one character as \"replacement\", found \"xy\""},
        {0, "pre_tokenizer", "{\"type\": \"Metaspace\", \"replacement\": \"_\", \"prepend_scheme\": \"last\"}",
         "found \"_\" and \"last\""},
        {0, "pre_tokenizer", "null", "model: expected ByteLevel, byte_fallback or an unk_token of the vocabulary"},
        {0, "decoder.type", "\"WordPiece\"",
         "decoder: expected ByteLevel alone, or Replace, ByteFallback, Fuse, Strip in this order, found \"WordPiece\""},
        {1, "decoder.decoders.3.stop", "1", "decoder: Strip: expected start 0 or more and stop 0"},
        {1, "decoder.decoders.2.type", "\"ByteFallback\"", "decoder: expected ByteLevel alone"},
        {1, "model.vocab.<0x41>", "-", "found none for 0x41 (byte_fallback)"},
        {1, "post_processor.type", "\"BertProcessing\"",
         "post_processor: expected ByteLevel or TemplateProcessing, found \"BertProcessing\""},
        {1, "post_processor.single", "-", "TemplateProcessing: expected a list as \"single\", found nothing"},
        {1, "post_processor.single.0", "7", "expected SpecialToken or Sequence A as item 0"},
        {1, "post_processor.single.1", "{\"Sequence\": {\"id\": \"B\"}}",
         "expected SpecialToken or Sequence A as item 1"},
        {1, "post_processor.single.2", "{\"Sequence\": {\"id\": \"A\"}}",
         "expected Sequence A once in \"single\", found it 2 times"},
        {1, "post_processor.special_tokens", "-", "expected a list special_tokens[\"<s>\"].ids, found nothing"},
        {1, "post_processor.special_tokens.<s>.ids.0", "1000", "post_processor: \"<s>\": no token has id 1000"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Tokenizer k;
        ErrorText error = {""};
        json_t* file = cases[i].kind == 1 ? character_file() : byte_level_file();
        if (cases[i].kind == 2) { edit(file, "added_tokens", "[]"); }
        edit(file, cases[i].path, cases[i].value);
        int ok = parse_file(&k, file, &error);
        if (ok) { tokenizer_free(&k); }
        check(t, cases[i].expected ? !ok && strstr(error.text, cases[i].expected) : ok,
              "%s = %s: expected \"%s\", found \"%s\"", cases[i].path, cases[i].value,
              cases[i].expected ? cases[i].expected : "no error", ok ? "no error" : error.text);
    }
}

static void test_broken_json(Test* t) {
    const struct { const char *text, *expected;
    } cases[] = {
        {"", "line 1"},
        {"[]", "a list instead of an object {...}"},
        {"{\"model\": ", "expected a tokenizer.json: line 1"},
        {"{\"model\": {}, \"model\": {}}", "duplicate object key"},
        {"{\"model\": {\"vocab\": {\"a\": 1, \"a\": 2}}}", "duplicate object key"},
        {"{\"a\": 99999999999999999999}", "too big integer"},
        {"{\"a\": NaN}", "invalid token"},
        {"{\"a\": \"\xff\"}", "unable to decode byte 0xff"},
        {"{\"a\": \"\\u0000\"}", "\\u0000 is not allowed"},
        {"{} x", "end of file expected"},
    };
    Tokenizer k;
    ErrorText error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int ok = parse_bytes(&k, cases[i].text, strlen(cases[i].text), &error);
        check(t, !ok && strstr(error.text, cases[i].expected), "%s: expected \"%s\", found \"%s\"", cases[i].text,
              cases[i].expected, ok ? "no error" : error.text);
    }
    char deep[100000];
    memset(deep, '[', sizeof deep);
    check(t, !parse_bytes(&k, deep, sizeof deep, &error) && strstr(error.text, "64 nested brackets"),
          "deep nesting: %s", error.text);
    ByteBuffer nested = {NULL, 0, 0};
    buffer_append(&nested, "{\"model\": {\"vocab\": {\"a\": 0}}, \"normalizer\": ", 45);
    for (int i = 0; i < 20; i++) { buffer_append(&nested, "{\"type\": \"Sequence\", \"normalizers\": [", 37); }
    for (int i = 0; i < 20; i++) { buffer_append(&nested, "]}", 2); }
    buffer_append(&nested, "}", 1);
    check(t,
          !parse_bytes(&k, (const char*)nested.bytes, nested.n, &error) &&
              strstr(error.text, "at most 16 Sequences in each other"),
          "%s", error.text);
    buffer_free(&nested);
}

// what takes the tokens of a text in pieces, and may be asked how large the largest was
typedef struct {
    int tokens[400000];
    size_t n, most;
} Taken;

static void take_tokens(void* to, const int* tokens, size_t n) {
    Taken* taken = (Taken*)to;
    memcpy(taken->tokens + taken->n, tokens, n * sizeof(int));
    taken->n += n;
    taken->most = n > taken->most ? n : taken->most;
}

static void test_pieces(Test* t) {
    Tokenizer k = open_file(byte_level_file());
    TokenizerWork w;
    Taken* taken = (Taken*)malloc_check(sizeof *taken, "tokens");
    const size_t n = 400000;
    char* text = (char*)malloc_check(n, "text");
    for (size_t i = 0; i < n; i++) { text[i] = i % 7 == 0 && i < n / 2 ? ' ' : (char)('a' + i % 5); }  // a long word last
    tokenizer_work_init(&w, &k, n);
    int* whole;
    const size_t n_whole = (size_t)tokenizer_encode_plain(&k, text, n, &whole);
    taken->n = taken->most = 0;
    tokenizer_encode_to(&k, &w, text, n, TOKENIZER_ADDED, take_tokens, taken);
    check(t, taken->n == n_whole && memcmp(taken->tokens, whole, n_whole * sizeof(int)) == 0, "the same tokens");
    taken->n = taken->most = 0;
    tokenizer_encode_to(&k, &w, text, n / 2, TOKENIZER_ADDED, take_tokens, taken);
    check(t, taken->most <= TOKENS_AT_ONCE && taken->n > TOKENS_AT_ONCE, "%zu at once of %zu", taken->most, taken->n);
    tokenizer_work_free(&w);
    tokenizer_free(&k);
    free(whole);
    free(text);
    free(taken);
}

static void need_too_much(void* nothing) {
    (void)nothing;
    memory_need((size_t)1 << 60, "a word");
}

static void test_memory(Test* t) {
    check_exit(t, "more memory than there is", need_too_much, NULL, 1, "a word: needs 1048576.00 TiB of memory, ");
}

// a file that is cut, or with one byte changed, is refused in one line, or is another tokenizer that can be used
static void test_damaged_files(Test* t) {
    json_t* file = character_file();
    char* text = json_dumps(file, JSON_COMPACT);
    size_t n = strlen(text);
    uint64_t seed = seeded_stream(13);
    Tokenizer k;
    ErrorText error;
    for (size_t i = 0; i < n; i += 97) {
        check(t, !parse_bytes(&k, text, i, &error) && error.text[0], "cut to %zu bytes", i);
    }
    for (int i = 0; i < 300; i++) {
        size_t at = xorshift_u32(&seed) % n;
        char kept = text[at];
        text[at] = (char)(xorshift_u32(&seed) % 4 ? "\"{}[],:0123456789.-eab "[xorshift_u32(&seed) % 23]
                                                  : (char)xorshift_u32(&seed));
        error.text[0] = '\0';
        if (parse_bytes(&k, text, n, &error)) {
            int* tokens;
            tokenizer_encode(&k, "abc \xc3\xa9</s>", 9, &tokens);
            free(tokens);
            tokenizer_free(&k);
        } else {
            check(t, error.text[0] && !strchr(error.text, '\n'), "byte %zu: a refusal needs one line", at);
        }
        text[at] = kept;
    }
    free(text);
    json_decref(file);
}

// ---- what Hugging Face tokenizers made of hard strings: dev/golden/tokenizers ----

static int check_golden_line(Test* t, const Tokenizer* k, const char* path, int number, const char* line,
                             size_t n_line) {
    json_t *record = json_loadb(line, n_line, JSON_ALLOW_NUL, NULL), *text = json_object_get(record, "text"),
           *ids = json_object_get(record, "ids"), *decoded = json_object_get(record, "decoded");
    int *tokens, n = tokenizer_encode(k, json_string_value(text), json_string_length(text), &tokens),
                 same = n == (int)json_array_size(ids);
    size_t n_bytes;
    for (int i = 0; same && i < n; i++) { same = tokens[i] == json_integer_value(json_array_get(ids, (size_t)i)); }
    check(t, same, "%s:%d: other tokens than expected", path, number);
    char* back = tokenizer_decode(k, tokens, n, &n_bytes);
    check(t, n_bytes == json_string_length(decoded) && memcmp(back, json_string_value(decoded), n_bytes) == 0,
          "%s:%d: decoded otherwise", path, number);
    free(back);
    free(tokens);
    json_decref(record);
    return same;
}

static void test_golden(Test* t) {
    glob_t files;
    if (glob("dev/golden/tokenizers/*.expected.jsonl", 0, NULL, &files) != 0) {
        skip(t, "dev/golden/tokenizers is not here");
        return;
    }
    for (size_t f = 0; f < files.gl_pathc; f++) {
        char path[512];
        MappedFile expected;
        Tokenizer k;
        snprintf(path, sizeof path, "%.*s.json", (int)(strstr(files.gl_pathv[f], ".expected") - files.gl_pathv[f]),
                 files.gl_pathv[f]);
        tokenizer_open(&k, path);
        file_map(&expected, files.gl_pathv[f]);
        const char *at = (const char*)expected.bytes, *end = at + expected.n_bytes;
        for (int number = 1; at < end; number++) {
            const char* newline = (const char*)memchr(at, '\n', (size_t)(end - at));
            if (!newline) { newline = end; }
            check_golden_line(t, &k, files.gl_pathv[f], number, at, (size_t)(newline - at));
            at = newline + 1;
        }
        file_unmap(&expected);
        tokenizer_free(&k);
    }
    globfree(&files);
}

// what tokenizer_save writes of the byte tokenizer
static json_t* bytes_file(const TempPath* folder) {
    Tokenizer k;
    SavedFiles files;
    files.n = 0;
    TempPath path = temp_path(folder, "tokenizer.json");
    tokenizer_open(&k, "bytes");
    tokenizer_save(folder->s, &k, &files);
    tokenizer_save_config(folder->s, &k, 64, &files);
    tokenizer_free(&k);
    return json_read(path.s);
}

// a tokenizer.json that changes what a byte means, or does more, is not taken for the byte tokenizer
static const struct { const char *path, *value; } other_bytes[] = {
    {"model.merges.0", "\"a b\""},
    {"normalizer", "{\"type\": \"NFC\"}"},
    {"pre_tokenizer.add_prefix_space", "true"},
    {"added_tokens.1", "{\"id\": 257, \"content\": \"<x>\"}"},
    {"added_tokens.0.content", "\"<s>\""},
    {"decoder", "null"},
    {"model.vocab.a", "98"},
    {"post_processor", "{\"type\": \"TemplateProcessing\", \"single\": [{\"SpecialToken\": {\"id\": \"e\"}}, "
                       "{\"Sequence\": {\"id\": \"A\"}}], \"special_tokens\": {\"e\": {\"ids\": [256]}}}"},
};

static void test_bytes_file(Test* t) {
    const char text[] = "\xc3\xa9 \xe6\x97\xa5\n\t\1<|endoftext|>";
    const char expected[] = "195 169 32 230 151 165 10 9 1 60 124 101 110 100 111 102 116 101 120 116 124 62";
    TempPath folder = temp_folder();
    json_t* file = bytes_file(&folder);
    Tokenizer k, generic = open_file(json_deep_copy(file));
    tokenizer_open(&k, folder.s);
    check(t, strcmp(k.kind, "bytes") == 0 && k.n_tokens == 257 && k.eot == 256 && k.json, "read back as %s", k.kind);
    check_ids(t, &k, text, usual, expected);
    check_ids(t, &k, "\xff\x80", usual, "255 128");
    check_ids(t, &generic, text, 0, expected);
    check_ids(t, &generic, "a<|endoftext|>", TOKENIZER_ADDED, "97 256");
    check(t, generic.n_tokens == 257 && generic.eot == 256, "other readers find %d tokens, end of text %d",
          generic.n_tokens, generic.eot);
    for (int id = 0; id < 256; id++) {
        int n_bytes;
        const char* bytes = tokenizer_bytes_of(&generic, id, &n_bytes);
        check(t, n_bytes == 1 && (unsigned char)*bytes == id, "token %d is not its byte", id);
    }
    tokenizer_free(&generic);
    tokenizer_free(&k);
    edit(file, "pre_tokenizer.use_regex", "true");  // where words end does not matter
    generic = open_file(json_deep_copy(file));
    check(t, tokenizer_is_bytes_(generic.pipeline), "with words it is the same tokenizer");
    tokenizer_free(&generic);
    for (size_t i = 0; i < sizeof other_bytes / sizeof other_bytes[0]; i++) {
        json_t* other = json_deep_copy(file);
        edit(other, other_bytes[i].path, other_bytes[i].value);
        if (strcmp(other_bytes[i].path, "model.vocab.a") == 0) { edit(other, "model.vocab.b", "97"); }
        if (strcmp(other_bytes[i].path, "model.merges.0") == 0) {
            edit(other, "model.vocab.ab", "256");
            edit(other, "added_tokens.0.id", "257");
        }
        generic = open_file(other);
        check(t, !tokenizer_is_bytes_(generic.pipeline), "%s: another tokenizer", other_bytes[i].path);
        tokenizer_free(&generic);
    }
    json_decref(file);
    temp_remove(&folder);
}

// tokenizer_config.json names end of text as it stands in the tokenizer.json
static void test_config_file(Test* t) {
    TempPath folder = temp_folder(), path = temp_path(&folder, "tokenizer_config.json");
    SavedFiles files;
    files.n = 0;
    json_decref(bytes_file(&folder));
    json_t* config = json_read(path.s);
    check(t, strcmp(json_string_value(json_object_get(config, "eos_token")), "<|endoftext|>") == 0 &&
          json_integer_value(json_object_get(config, "model_max_length")) == 64, "of the byte tokenizer");
    json_decref(config);
    Tokenizer k = open_file(character_file());
    tokenizer_save_config(folder.s, &k, 64, &files);
    config = json_read(path.s);
    check(t, strcmp(json_string_value(json_object_get(config, "eos_token")), "</s>") == 0 &&
          !json_object_get(config, "bos_token") && files.n == 1, "of another: </s>, and no beginning of text");
    json_decref(config);
    tokenizer_free(&k);
    temp_remove(&folder);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"UTF-8", "what is none becomes U+FFFD as in Python, what is some stays", test_repair},
        {"classes", "have as many characters as Unicode 16.0", test_classes},
        {"NFC", "joins, sorts and leaves alone as Unicode 9.0, a million marks in linear time", test_nfc},
        {"words", "are cut as the four known expressions and others say", test_words},
        {"matchers", "written by hand agree with PCRE2 on 80,000 hard texts", test_matchers},
        {"merges", "of short and long words follow the plain rule", test_merges},
        {"byte level", "gives the ids of GPT-2's and Qwen's pipeline", test_byte_level},
        {"characters", "gives the ids of Mistral's pipelines, old and new", test_characters},
        {"merge across words", "keeps a text from being cut at blanks", test_merge_across_words},
        {"added tokens", "strip, stand alone, are normalised and found as in the original", test_added_tokens},
        {"splits", "follow each other", test_splits},
        {"workspace", "changes no token when it is used again", test_workspace},
        {"long words", "of four million bytes take n log n", test_long_words},
        {"pieces", "hold the same tokens, never all at once", test_pieces},
        {"memory", "is asked for before it is taken", test_memory},
        {"decode", "gives the text of Hugging Face's decode", test_decode},
        {"stream", "gives decode's text in pieces that are whole characters", test_stream},
        {"print safe", "keeps control characters from the terminal", test_print_safe},
        {"open", "takes files by content and folders, and says what is missing or left out", test_open},
        {"bytes as a file", "are written for others and read back as bytes, what differs is not", test_bytes_file},
        {"config file", "names end of text, and no beginning", test_config_file},
        {"broken files", "are refused, each with its own message", test_broken_files},
        {"broken JSON", "is refused with its line", test_broken_json},
        {"damaged files", "never do more than be refused", test_damaged_files},
        {"golden", "tokens and texts equal Hugging Face tokenizers 0.23.3", test_golden},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
