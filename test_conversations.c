/*
Conversations to learn from: gzip (gunzip.h), JSON Lines in three forms (conversations.h), rows of several samples
(pack.h).
*/
#include "llmc/ops/documents.h"       // documents_segments
#include "llmc/test/test.h"           // Test, check, check_exit, test_main
#include "llmc/test/testfiles.h"      // temp_folder, temp_file
#include "llmc/text/conversations.h"  // conversations_read, Conversations
#include "llmc/text/pack.h"           // pack_rows

// ---- gzip ----

// a member as gzip writes it; the caller frees
static unsigned char* packed(const void* bytes, size_t n_bytes, size_t* n_packed) {
    z_stream z;
    memset(&z, 0, sizeof z);
    deflateInit2(&z, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
    const size_t room = deflateBound(&z, n_bytes);
    unsigned char* out = (unsigned char*)new_array(room, 1);
    z.next_in = (Bytef*)bytes;
    z.avail_in = (uInt)n_bytes;
    z.next_out = out;
    z.avail_out = (uInt)room;
    deflate(&z, Z_FINISH);
    *n_packed = room - z.avail_out;
    deflateEnd(&z);
    return out;
}

static void check_unpacked(Test* t, const char* what, const unsigned char* bytes, size_t n, const char* want,
                           size_t n_want) {
    ByteBuffer out = {NULL, 0, 0};
    ErrorText error = {""};
    unsigned char* copy = heap_copy(bytes, n);
    const int ok = gunzip(&out, copy, n, "test", &error);
    check(t, ok && out.n == n_want && memcmp(out.bytes, want, n_want) == 0, "%s: %zu bytes, expected %zu; %s", what,
          out.n, n_want, error.text);
    free(copy);
    buffer_free(&out);
}

static void check_damaged(Test* t, const char* what, const unsigned char* bytes, size_t n, const char* why) {
    ByteBuffer out = {NULL, 0, 0};
    ErrorText error = {""};
    unsigned char* copy = heap_copy(bytes, n);
    check(t, !gunzip(&out, copy, n, "test", &error) && strstr(error.text, why), "%s: %s", what, error.text);
    free(copy);
    buffer_free(&out);
}

static void test_gunzip(Test* t) {
    const size_t n_large = (3 << 20) + 17;  // more than is unpacked at once
    char* large = (char*)new_array(n_large, 1);
    uint64_t random = seeded_stream(1);
    for (size_t i = 0; i < n_large; i++) { large[i] = "abc\n"[xorshift_u32(&random) % 4]; }
    size_t n, n2;
    unsigned char *first = packed("Hello\n", 6, &n), *second = packed(large, n_large, &n2);
    unsigned char* both = (unsigned char*)new_array(n + n2 + 9, 1);
    memcpy(both, first, n);
    memcpy(both + n, second, n2);
    check_unpacked(t, "one member", first, n, "Hello\n", 6);
    check_unpacked(t, "a large one", second, n2, large, n_large);
    char* joined = (char*)new_array(6 + n_large, 1);
    memcpy(joined, "Hello\n", 6);
    memcpy(joined + 6, large, n_large);
    check_unpacked(t, "two members", both, n + n2, joined, 6 + n_large);
    check_unpacked(t, "with zeros behind", both, n + n2 + 9, joined, 6 + n_large);
    for (size_t cut = 1; cut < n; cut++) { check_damaged(t, "cut short", first, cut, "cut short"); }
    check_damaged(t, "a large one, cut short", second, n2 - 9, "cut short");
    first[n - 5] ^= 1;
    check_damaged(t, "another checksum", first, n, "damaged");
    memcpy(both + n, "garbage!", 8);
    check_damaged(t, "garbage behind", both, n + 8, "damaged");
    free(first), free(second), free(both), free(joined), free(large);
}

// ---- conversations ----

typedef struct {
    TempPath folder;
    ChatTemplate t;
    Tokenizer k;
    Conversations c;
} Sets;

static void sets_init(Sets* s, ChatKind kind, const char* tokenizer, int most, Truncate truncate) {
    s->folder = temp_folder();
    chat_template_init(&s->t, kind);
    tokenizer_open(&s->k, tokenizer);
    conversations_init(&s->c, &s->t, &s->k, most, truncate);
}

static void sets_free(Sets* s) {
    conversations_free(&s->c);
    chat_template_free(&s->t);
    tokenizer_free(&s->k);
    temp_remove(&s->folder);
}

// lines with ' for "
static TempPath sets_file(Sets* s, const char* name, const char* lines) {
    char* text = string_copy(lines);
    for (char* c = text; *c; c++) { *c = *c == '\'' ? '"' : *c; }
    TempPath path = temp_file(&s->folder, name, text, strlen(text));
    free(text);
    return path;
}

// the bytes of sample i of the byte tokenizer, what is learned between brackets; until the next call
static const char* shown(const Sets* s, int64_t i) {
    static char text[4000];
    int n, used = 0, was = 0;
    const int* tokens = conversations_sample(&s->c, i, &n);
    for (int k = 0; k <= n && used < 3990; k++) {
        const int is = k < n && tokens[k] >= 0;
        if (is != was) { text[used++] = is ? '[' : ']'; }
        was = is;
        if (k < n) { text[used++] = (char)conversations_id(tokens[k]); }
    }
    text[used] = '\0';
    return text;
}

static void test_forms(Test* t) {
    const struct { const char *line, *want; } cases[] = {
        {"{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}], 'id': 7}",
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}, {'role': 'user', "
         "'content': 'not read'}]}", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}]}",
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'conversations': [{'from': 'system', 'value': 's'}, {'from': 'user', 'value': 'a'}, {'from': 'assistant', "
         "'value': 'b'}]}",
         "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'conversations': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}], 'system': 's'}",
         "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'instruction': 'a', 'output': 'b'}", "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'instruction': 'a', 'input': '', 'response': 'b', 'system': ''}",
         "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"},
        {"{'instruction': 'a', 'input': 'x', 'output': 'b', 'system': 's', 'history': [['c', 'd']]}",
         "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]\n"
         "<|im_start|>user\na\nx<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]"}};
    Sets s;
    sets_init(&s, CHAT_CHATML, "bytes", 0, TRUNCATE_DROP);
    const int n = (int)(sizeof cases / sizeof cases[0]);
    ByteBuffer all = {NULL, 0, 0};
    for (int i = 0; i < n; i++) {
        buffer_append_text(&all, cases[i].line);
        buffer_append_text(&all, i % 2 ? "\n" : "\r\n\n");
    }
    buffer_append(&all, "", 1);
    TempPath path = sets_file(&s, "a.jsonl", (char*)all.bytes);
    conversations_read(&s.c, path.s);
    check(t, s.c.n == n && s.c.n_lines == n && s.c.n_reasons[SAMPLE_GOOD] == n, "%lld samples", (long long)s.c.n);
    for (int i = 0; i < n && i < s.c.n; i++) {
        check(t, strcmp(shown(&s, i), cases[i].want) == 0, "%s: found %s", cases[i].line, shown(&s, i));
    }
    buffer_free(&all);
    sets_free(&s);
}

// of a conversation with two answers, for those who want to learn the last alone
static void test_last(Test* t) {
    Sets s;
    sets_init(&s, CHAT_CHATML, "bytes", 0, TRUNCATE_DROP);
    s.c.last_only = 1;
    TempPath path = sets_file(&s, "a.jsonl", "{'instruction': 'c', 'output': 'd', 'history': [['a', 'b']]}");
    conversations_read(&s.c, path.s);
    check(t, s.c.n == 1 && strcmp(shown(&s, 0), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
                                  "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n[d<|im_end|>]") == 0,
          "found %s", shown(&s, 0));
    sets_free(&s);
}

static void test_tools(Test* t) {
    const struct { ChatKind kind; const char *line, *want; } cases[] = {
        {CHAT_QWEN3,
         "{'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'function_call', 'value': '{\\'name\\': "
         "\\'f\\', \\'arguments\\': {\\'x\\': 1}}'}, {'from': 'observation', 'value': '2'}, {'from': 'gpt', 'value': "
         "'b'}], 'tools': '[{\\'name\\': \\'f\\'}]'}", "<tools>\n{\"name\": \"f\"}\n</tools>"},
        {CHAT_QWEN3,
         "{'conversations': [{'from': 'human', 'value': 'a'}, {'from': 'function_call', 'value': '[{\\'name\\': "
         "\\'f\\', \\'arguments\\': {\\'x\\':1}}]'}], 'tools': ''}",
         "[<think>\n\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call><|im_end|>]"},
        // arguments as text: as they are, or as the object where the template would put quotes around them
        {CHAT_QWEN3,
         "{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'tool_calls': [{'name': 'f', "
         "'arguments': '{\\'x\\':1}'}]}]}", "\"arguments\": {\"x\":1}}"},
        {CHAT_QWEN2_5,
         "{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'tool_calls': [{'function': {'name': "
         "'f', 'arguments': '{\\'x\\':1}'}}]}]}", "\"arguments\": {\"x\": 1}}"},
        {CHAT_QWEN2_5,
         "{'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'tool_calls': [{'name': 'f', "
         "'arguments': 'x'}]}]}", "\"arguments\": \"x\"}"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Sets s;
        sets_init(&s, cases[i].kind, "bytes", 0, TRUNCATE_DROP);
        TempPath path = sets_file(&s, "a.jsonl", cases[i].line);
        conversations_read(&s.c, path.s);
        check(t, s.c.n == 1 && strstr(shown(&s, 0), cases[i].want), "%s: found %s", cases[i].line, shown(&s, 0));
        sets_free(&s);
    }
}

#define GOOD "{'instruction': 'a', 'output': 'b'}\n"

static const struct { SampleReason reason; const char *line, *text; } left_out[] = {
    {SAMPLE_JSON, "{'instruction': 'a',", "expected a JSON object such as {\"messages\": [...]}"},
    {SAMPLE_JSON, "[", "found a list"},
    {SAMPLE_JSON, "{'messages': [], 'messages': []}", "duplicate"},
    {SAMPLE_FORM, "{}", "found an empty object"},
    {SAMPLE_FORM, "{'text': 'a', 'id': 1}", "\"conversations\" or \"instruction\", found \"text\", \"id\""},
    {SAMPLE_FORM, "{'messages': 7}", "expected a list of messages"},
    {SAMPLE_FORM, "{'messages': [{'role': 'developer', 'content': ''}]}", "message 1: expected \"role\""},
    {SAMPLE_FORM, "{'conversations': 'a'}", "expected a list of turns"},
    {SAMPLE_FORM, "{'conversations': [{'from': 'bot', 'value': 'a'}]}", "turn 1: expected \"from\""},
    {SAMPLE_FORM, "{'conversations': [{'from': 'gpt', 'value': 7}]}", "turn 1"},
    {SAMPLE_FORM, "{'conversations': [{'from': 'function_call', 'value': 'f(x)'}]}", "function_call"},
    {SAMPLE_FORM, "{'conversations': [{'from': 'function_call', 'value': '{}, \\'b\\': {}'}]}", "function_call"},
    {SAMPLE_FORM, "{'conversations': [7]}", "turn 1"},
    {SAMPLE_FORM, "{'instruction': 'a', 'output': null}", "\"output\""},
    {SAMPLE_FORM, "{'instruction': 7, 'output': 'a'}", "\"instruction\""},
    {SAMPLE_FORM, "{'instruction': 'a\\u0000', 'input': 'x', 'output': 'a'}", "without a 0"},
    {SAMPLE_FORM, "{'instruction': 'a', 'output': 'b', 'history': [['c']]}", "\"history\""},
    {SAMPLE_FORM, "{'messages': [{'role': 'user', 'content': 'a'}], 'tools': 'f'}", "\"tools\""},
    {SAMPLE_TOOLS, "{'messages': [{'role': 'tool', 'content': 'a'}]}", "has no tools"},
    {SAMPLE_EMPTY, "{'messages': [{'role': 'user', 'content': 'a'}]}", "expected an answer, found none"},
    {SAMPLE_EMPTY, "{'instruction': 'a', 'output': ' \\n\\u3000'}", "message 2: expected an answer, found an empty"},
    {SAMPLE_MARKER, "{'instruction': 'a<|im_end|>', 'output': 'b'}", "found the special token <|im_end|>"},
    {SAMPLE_MARKER, "{'instruction': 'a', 'output': '<|im_start|>user'}", "found the special token <|im_start|>"},
    {SAMPLE_LONG, "{'instruction': 'a', 'output': 'a long one, a long one, a long one, a long one, a long one'}",
     "expected at most 100 tokens, found 119"},
};

static void test_left_out(Test* t) {
    for (size_t i = 0; i < sizeof left_out / sizeof left_out[0]; i++) {
        Sets s;
        char lines[1000], want[600];
        sets_init(&s, CHAT_CHATML, "bytes", 100, TRUNCATE_DROP);
        snprintf(lines, sizeof lines, "%s%s\n\n%s\n%s", GOOD, left_out[i].line, left_out[i].line, GOOD);
        TempPath path = sets_file(&s, "a.jsonl", lines);
        conversations_read(&s.c, path.s);
        const SampleReason reason = left_out[i].reason;
        const char* first = s.c.named[reason][0] ? s.c.named[reason][0] : "";
        snprintf(want, sizeof want, "%s:2: ", path.s);
        check(t, s.c.n == 2 && s.c.n_lines == 4 && s.c.n_reasons[reason] == 2, "%s: %lld samples, %lld of this reason",
              left_out[i].line, (long long)s.c.n, (long long)s.c.n_reasons[reason]);
        check(t, strncmp(first, want, strlen(want)) == 0 && strstr(first, left_out[i].text), "%s: %s", left_out[i].line,
              first);
        snprintf(want, sizeof want, "%s:4: ", path.s);
        const char* second = s.c.named[reason][1] ? s.c.named[reason][1] : "";
        check(t, strncmp(second, want, strlen(want)) == 0 && !s.c.named[reason][2], "%s: the second is %s",
              left_out[i].line, second);
        sets_free(&s);
    }
}

// what is a special token to the tokenizer alone, and what is none
static void test_special(Test* t) {
    const struct { ChatKind kind; const char *tokenizer, *text; int is_used; } cases[] = {
        {CHAT_QWEN3, "qwen2", "<|endoftext|>", 0}, {CHAT_QWEN3, "qwen2", "<|im_end|", 1},
        {CHAT_QWEN3, "qwen2", "<think>", 1},       {CHAT_QWEN3, "qwen2", "<<|im_end|>", 0},
        {CHAT_MISTRAL_V3, "mistral-v0.3", "[TOOL_CALLS]", 0}, {CHAT_MISTRAL_V1, "mistral-v0.1", "[INST]", 0},
        {CHAT_MISTRAL_V1, "mistral-v0.1", "[TOOL_CALLS]", 1}, {CHAT_MISTRAL_V1, "mistral-v0.1", "<s>old</s>", 0}};
    if (access("dev/golden/tokenizers/qwen2.json", R_OK) != 0) {
        skip(t, "dev/golden/tokenizers is not here");
        return;
    }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Sets s;
        char path[200], lines[400];
        snprintf(path, sizeof path, "dev/golden/tokenizers/%s.json", cases[i].tokenizer);
        sets_init(&s, cases[i].kind, path, 0, TRUNCATE_DROP);
        snprintf(lines, sizeof lines, "%s{'instruction': 'a%sb', 'output': 'b'}\n", GOOD, cases[i].text);
        TempPath file = sets_file(&s, "a.jsonl", lines);
        conversations_read(&s.c, file.s);
        check(t, s.c.n == 1 + cases[i].is_used && s.c.n_reasons[SAMPLE_MARKER] == !cases[i].is_used, "%s with %s: %lld",
              cases[i].text, cases[i].tokenizer, (long long)s.c.n);
        sets_free(&s);
    }
}

static void test_truncate(Test* t) {
    const char* lines = "{'instruction': 'a', 'output': 'bcdef'}\n";  // 28 + 1 + 22 bytes before the answer
    const char* header = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n";
    const int n_header = (int)strlen(header);
    for (int most = n_header; most <= n_header + 16; most++) {
        Sets s;
        char want[200];
        sets_init(&s, CHAT_CHATML, "bytes", most, TRUNCATE_END);
        char* both = (char*)malloc_check(300, "text");
        snprintf(both, 300, "{'messages': [{'role': 'assistant', 'content': 'x'}]}\n%s", lines);
        TempPath path = sets_file(&s, "a.jsonl", both);
        conversations_read(&s.c, path.s);
        const int n_learned = most - n_header, is_used = n_learned > 0, is_cut = n_learned < 15;
        check(t, s.c.n == 1 + is_used && s.c.n_reasons[SAMPLE_UNLEARNED] == !is_used, "%d: %lld samples", most,
              (long long)s.c.n);
        check(t, s.c.n_cut == (is_used && is_cut), "%d: %lld are cut", most, (long long)s.c.n_cut);
        snprintf(want, sizeof want, "%s[%.*s]", header, n_learned, "bcdef<|im_end|>");
        check(t, !is_used || strcmp(shown(&s, 1), want) == 0, "%d: found %s, expected %s", most, shown(&s, 1), want);
        check(t, s.c.n_needed == n_header + 15 && s.c.n_longest <= most, "%d: the longest has %lld", most,
              (long long)s.c.n_needed);
        free(both);
        sets_free(&s);
    }
}

// ---- files ----

typedef struct { Sets* s; const char* path; } Asked;

static void read_path(void* asked) { conversations_read(&((Asked*)asked)->s->c, ((Asked*)asked)->path); }

static void test_files(Test* t) {
    Sets s;
    sets_init(&s, CHAT_CHATML, "bytes", 0, TRUNCATE_DROP);
    size_t n;
    const char line[] = "{\"instruction\": \"z\", \"output\": \"zip\"}\n";
    unsigned char* zip = packed(line, sizeof line - 1, &n);
    TempPath a = sets_file(&s, "set/a.jsonl", "\xef\xbb\xbf" GOOD), none = sets_file(&s, "empty.jsonl", "");
    temp_file(&s.folder, "set/b.JSONL.gz", zip, n);
    temp_file(&s.folder, "zipped", zip, n);  // told by its content
    sets_file(&s, "set/readme.txt", "not read");
    TempPath cut = temp_file(&s.folder, "cut.gz", zip, n - 1), list = sets_file(&s, "list.json", "[\n" GOOD "]\n");
    char both[1200];
    snprintf(both, sizeof both, "%s/set,%s/zipped", s.folder.s, s.folder.s);
    conversations_read(&s.c, both);
    const int zipped = s.c.n == 3 && strstr(shown(&s, 1), "[zip<") && strstr(shown(&s, 2), "[zip<");
    check(t, zipped, "%lld samples", (long long)s.c.n);
    conversations_read(&s.c, a.s);
    check(t, s.c.n == 4, "more of them: %lld", (long long)s.c.n);
    Asked asked = {&s, none.s};
    conversations_read(&s.c, none.s);  // there are samples
    conversations_free(&s.c);
    conversations_init(&s.c, &s.t, &s.k, 0, TRUNCATE_DROP);
    check_exit(t, "an empty file", read_path, &asked, 2, "expected conversations as JSON Lines");
    asked.path = cut.s;
    check_exit(t, "a cut archive", read_path, &asked, 2, "cut.gz: expected the end of the gzip archive");
    asked.path = "nowhere.jsonl";
    check_exit(t, "no file", read_path, &asked, 2, "nowhere.jsonl: expected a file");
    snprintf(both, sizeof both, "%s:2", a.s);
    asked.path = both;
    check_exit(t, "a weight", read_path, &asked, 2, "expected paths without weights");
    conversations_read(&s.c, list.s);  // its second line is one
    check(t, s.c.n == 1 && s.c.n_reasons[SAMPLE_JSON] == 2, "a list: %lld samples", (long long)s.c.n);
    free(zip);
    sets_free(&s);
}

// ---- packing ----

// as many samples as there are lengths, of 3 tokens or more each: sample i has tokens 100 * i, 100 * i + 1, ...; which
// are learned is random, the first two are not, the last one is
static void sets_make(Conversations* c, const int* lengths, int n, uint64_t* random) {
    memset(c, 0, sizeof *c);
    c->starts = (int64_t*)malloc_check(sizeof(int64_t) * (size_t)(n + 1), "starts");
    c->starts[0] = 0;
    c->n = n;
    for (int i = 0; i < n; i++) { c->starts[i + 1] = c->starts[i] + lengths[i]; }
    c->tokens = (int*)malloc_check(sizeof(int) * (size_t)c->starts[n], "tokens");
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < lengths[i]; k++) {
            const int is_learned = k == lengths[i] - 1 || (k > 1 && xorshift_u32(random) % 2);
            c->tokens[c->starts[i] + k] = is_learned ? 100 * i + k : ~(100 * i + k);
        }
    }
}

// Does the sample stand in the rows at this position, with its targets? Its segment must be there too.
static int stands_at(const Conversations* c, int i, const int* inputs, const int* targets, const Segment* segment) {
    int n;
    const int* tokens = conversations_sample(c, i, &n);
    int good = segment->T == n - 1;
    for (int k = 0; k + 1 < n && good; k++) {
        const int target = k == 0 ? PACK_BEGINS : tokens[k + 1] >= 0 ? tokens[k + 1] : -1;
        good = inputs[segment->first + (size_t)k] == conversations_id(tokens[k]) &&
               targets[segment->first + (size_t)k] == target;
    }
    return good;
}

enum { PADDING = 77 };

static int is_padding(const int* inputs, const int* targets, const Segment* segment) {
    for (int k = 0; k < segment->T; k++) {
        const size_t at = segment->first + (size_t)k;
        if (inputs[at] != PADDING || targets[at] >= 0) { return 0; }
    }
    return 1;
}

// every sample of first .. first + n - 1 stands in the rows once, in a segment of its own; all else is padding
static void check_packed(Test* t, const Conversations* c, int first, int n, int T, uint64_t key) {
    TokenData d;
    DataLoader rows;
    const double share = pack_rows(&d, c, first, n, "test", T, PADDING, key, 1);
    dataloader_init(&rows, &d, T, ORDER_FILE, 0);
    const int B = (int)rows.n_rows;
    int* inputs = (int*)new_array((size_t)(B * T), sizeof(int));
    int* targets = (int*)new_array((size_t)(B * T), sizeof(int));
    Segment* segments = (Segment*)new_array((size_t)(B * T), sizeof(Segment));
    dataloader_batch(&rows, 0, B, inputs, targets);
    const int n_segments = documents_segments(segments, targets, B, T, PACK_BEGINS);
    int n_found = 0, n_filled = 0;
    int64_t n_learned = 0;
    for (int k = 0; k < n_segments; k++) {
        const int i = inputs[segments[k].first] / 100;
        const int is_padded = is_padding(inputs, targets, &segments[k]);
        const int is_one = i >= first && i < first + n;
        const int is_sample = !is_padded && is_one && stands_at(c, i, inputs, targets, &segments[k]);
        check(t, is_padded || is_sample, "segment %d of %d is neither a sample nor padding", k, n_segments);
        n_filled += is_padded ? segments[k].T : 0;
        n_found += is_sample;
    }
    for (int64_t k = c->starts[first]; k < c->starts[first + n]; k++) { n_learned += c->tokens[k] >= 0; }
    check(t, n_found == n, "expected %d samples, found %d", n, n_found);
    const double filled = (double)n_filled / (B * T);
    check(t, fabs(share - filled) < 1e-12, "%g is filled up, not %g", filled, share);
    check(t, dataloader_counted(&rows, 0, B) == n_learned, "expected %lld targets", (long long)n_learned);
    free(inputs), free(targets), free(segments);
    tokens_close(&d);
}

static void test_pack(Test* t) {
    uint64_t random = seeded_stream(3);
    for (int round = 0; round < 60; round++) {
        Conversations c;
        int lengths[40];
        const int n = 1 + (int)(xorshift_u32(&random) % 40), T = 2 + (int)(xorshift_u32(&random) % 40);
        for (int i = 0; i < n; i++) { lengths[i] = 3 + (int)(xorshift_u32(&random) % (uint32_t)(T - 1)); }
        sets_make(&c, lengths, n, &random);
        const int first = round % 2 ? n / 3 : 0;
        check_packed(t, &c, first, n - first, T, (uint64_t)round);
        free(c.tokens);
        free(c.starts);
    }
}

// without packing sample i is row i
static void test_pack_alone(Test* t) {
    enum { SAMPLES = 5, T = 9 };
    const int lengths[SAMPLES] = {3, T + 1, 5, 4, 3};
    uint64_t random = seeded_stream(9);
    Conversations c;
    TokenData d;
    DataLoader rows;
    int inputs[T], targets[T], n_filled = 0;
    sets_make(&c, lengths, SAMPLES, &random);
    const double share = pack_rows(&d, &c, 0, SAMPLES, "test", T, PADDING, 1, 0);
    dataloader_init(&rows, &d, T, ORDER_FILE, 0);
    check(t, rows.n_rows == SAMPLES, "expected %d rows, found %lld", SAMPLES, (long long)rows.n_rows);
    for (int i = 0; i < SAMPLES; i++) {
        const Segment sample = {0, 1, lengths[i] - 1}, padding = {(size_t)sample.T, 1, T - sample.T};
        dataloader_row(&rows, i, inputs, targets);
        check(t, stands_at(&c, i, inputs, targets, &sample), "row %d is not sample %d", i, i);
        check(t, is_padding(inputs, targets, &padding), "row %d: its end is not padding", i);
        check(t, padding.T == 0 || targets[sample.T] == PACK_BEGINS, "row %d: padding has no beginning", i);
        n_filled += padding.T;
    }
    check(t, fabs(share - (double)n_filled / (SAMPLES * T)) < 1e-12, "%g is filled up", share);
    tokens_close(&d);
    free(c.tokens);
    free(c.starts);
}

// the bytes of the rows
static uint64_t packed_sum(const Conversations* c, int T, uint64_t key, double* share, int64_t* n_rows) {
    TokenData d;
    *share = pack_rows(&d, c, 0, c->n, "test", T, PADDING, key, 1);
    const uint64_t sum = tokens_checksum(&d);
    *n_rows = d.n_tokens / T;
    tokens_close(&d);
    return sum;
}

typedef struct { const Conversations* c; int T; } Rows;

static void pack_too_long(void* rows) {
    TokenData d;
    pack_rows(&d, ((Rows*)rows)->c, 0, ((Rows*)rows)->c->n, "data.jsonl", ((Rows*)rows)->T, 0, 1, 1);
}

static void test_pack_order(Test* t) {
    Conversations c;
    uint64_t random = seeded_stream(4);
    int lengths[2000];
    double share, again, other;
    int64_t n_rows, n_same, n_other, n_needed = 0;
    for (int i = 0; i < 2000; i++) {
        lengths[i] = 3 + (int)(xorshift_u32(&random) % 126);
        n_needed += lengths[i] - 1;
    }
    sets_make(&c, lengths, 2000, &random);
    const uint64_t sum = packed_sum(&c, 512, 5, &share, &n_rows);
    check(t, packed_sum(&c, 512, 5, &again, &n_same) == sum, "the same key gives other rows");
    check(t, packed_sum(&c, 512, 6, &other, &n_other) != sum, "another key gives the same rows");
    check(t, n_rows == (n_needed + 511) / 512 || share < 0.01, "%.2f%% of %lld rows are filled up", 100.0 * share,
          (long long)n_rows);
    Rows rows = {&c, 100};
    check_exit(t, "a sample that is too long", pack_too_long, &rows, 2, "data.jsonl: a sample has 1");
    free(c.tokens);
    free(c.starts);
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"gunzip", "one member or several come back; every cut and damage is refused", test_gunzip},
        {"forms", "messages, ShareGPT and alpaca become one; what is learned is the answers", test_forms},
        {"last", "of two answers the last alone is learned where last_only says so", test_last},
        {"tools", "calls as text, tools as text, arguments as text", test_tools},
        {"left out", "a sample that cannot be used is counted, the first named by file and line", test_left_out},
        {"special", "special tokens in what somebody says leave a sample out", test_special},
        {"truncate", "at every length what is learned is the beginning of the answer", test_truncate},
        {"files", "folders, lists, archives; nothing to read is refused", test_files},
        {"pack", "each sample stands in the rows once, in a segment of its own", test_pack},
        {"pack alone", "without sharing rows each sample has its own", test_pack_alone},
        {"pack order", "is that of the key; less than 1% of 2,000 samples' rows is filled up", test_pack_order},
    };
    json_never_null();
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
