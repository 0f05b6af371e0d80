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

// ---- images ----

enum { PAD = 786, VISION_BEGIN = 783, VISION_END = 784 };  // of dev/golden/tokenizers/qwen3.5.json

// a file has its number of placeholders as text; *of counts how often one was looked at
static int image_tokens(void* of, const char* path, ErrorText* error) {
    MappedFile file;
    ++*(int*)of;
    if (!file_map_or_not(&file, path, error)) { return 0; }
    const int n = file.n_bytes > 0 ? atoi((const char*)file.bytes) : 0;
    file_unmap(&file);
    return n > 0 ? n : error_set(error, "expected an image, found another file");
}

// the tokenizer of Qwen3.5 with its chat template; 0: it is not here
static int sets_see(Test* t, Sets* s, int most, Truncate truncate, const ImageMeasure* measure) {
    if (access("dev/golden/tokenizers/qwen3.5.json", R_OK) != 0) {
        skip(t, "dev/golden/tokenizers is not here");
        return 0;
    }
    sets_init(s, CHAT_QWEN3_6, "dev/golden/tokenizers/qwen3.5.json", most, truncate);
    s->c.measure = measure;
    sets_file(s, "pics/three.png", "3 ");
    sets_file(s, "one.png", "1 ");
    sets_file(s, "a five.png", "5 ");
    sets_file(s, "broken.png", "0 ");
    return 1;
}

static void check_seen(Test* t, const Sets* s, int64_t i, int n, const char* name) {
    const Conversations* c = &s->c;
    const SampleImage* image = &c->images[i];
    const ImageFile* file = &c->files.of[image->file];
    check(t, strstr(file->path, name) && file->n_tokens == n, "image %lld: %s has %d", (long long)i, file->path,
          file->n_tokens);
    check(t, conversations_id(c->tokens[image->at - 1]) == VISION_BEGIN, "image %lld begins elsewhere", (long long)i);
    check(t, conversations_id(c->tokens[image->at + n]) == VISION_END, "image %lld ends elsewhere", (long long)i);
    for (int k = 0; k < n; k++) {
        check(t, c->tokens[image->at + k] == ~PAD, "image %lld: placeholder %d is token %d", (long long)i, k,
              c->tokens[image->at + k]);
    }
}

static void test_images(Test* t) {
    Sets s;
    int n_looks = 0;
    const ImageMeasure measure = {&n_looks, image_tokens, PAD, 0};
    if (!sets_see(t, &s, 0, TRUNCATE_DROP, &measure)) { return; }
    char lines[4000];
    snprintf(lines, sizeof lines,
             "{'messages': [{'role': 'user', 'content': [{'type': 'image', 'image': 'pics/three.png'}, {'type': "
             "'text', 'text': 'x'}, {'type': 'image_url', 'image_url': {'url': 'one.png'}}]}, {'role': 'assistant', "
             "'content': 'y'}]}\n" GOOD
             "{'images': ['one.png', {'path': 'pics/../one.png'}], 'messages': [{'role': 'user', 'content': "
             "'a<image>'}, {'role': 'assistant', 'content': [{'type': 'text', 'text': 'b'}, {'type': 'image', 'image': "
             "'file://%s/a%%20five.png'}, {'type': 'image'}]}, {'role': 'user', 'content': [{'type': 'image', 'path': "
             "'a five.png'}]}]}\n"
             "{'image': 'pics/three.png', 'conversations': [{'from': 'human', 'value': '<image>\\na'}, {'from': 'gpt', "
             "'value': 'b'}]}\n", s.folder.s);
    TempPath path = sets_file(&s, "a.jsonl", lines);
    conversations_read(&s.c, path.s);
    check(t, s.c.n == 4 && s.c.n_images == 6, "%lld samples, %lld images: %s", (long long)s.c.n,
          (long long)s.c.n_images, s.c.named[SAMPLE_IMAGE_FILE][0] ? s.c.named[SAMPLE_IMAGE_FILE][0] : "");
    if (s.c.n_images == 6) {
        check_seen(t, &s, 0, 3, "/pics/three.png");
        check_seen(t, &s, 1, 1, "/one.png");
        check_seen(t, &s, 2, 1, "/one.png");
        check_seen(t, &s, 3, 5, "/a five.png");
        check_seen(t, &s, 4, 1, "/pics/../one.png");
        check_seen(t, &s, 5, 3, "/pics/three.png");
        // in an answer the others are learned; what stands behind the last one is not stored
        check(t, s.c.tokens[s.c.images[3].at - 1] == VISION_BEGIN && s.c.tokens[s.c.images[3].at + 5] == VISION_END,
              "the tokens around an image of an answer are not learned");
    }
    check(t, n_looks == 4 && s.c.files.n == 4, "%d files were looked at, %d are kept", n_looks, s.c.files.n);
    sets_free(&s);
}

static const struct { SampleReason reason; ChatKind kind; const char *content, *text; } unseen[] = {
    {SAMPLE_IMAGE_FILE, CHAT_QWEN3_6, "{'type': 'image', 'image': 'none.png'}", "/none.png: cannot be opened: No such"},
    {SAMPLE_IMAGE_FILE, CHAT_QWEN3_6, "{'type': 'image', 'image': 'pics'}", "/pics: expected a file, found a folder"},
    {SAMPLE_IMAGE_FILE, CHAT_QWEN3_6, "{'type': 'image', 'image': 'broken.png'}", "/broken.png: expected an image"},
    {SAMPLE_IMAGES, CHAT_QWEN3_6, "{'type': 'image', 'image': 'https://a.b/c.png'}", "https://a.b/c.png: expected the"},
    {SAMPLE_IMAGES, CHAT_QWEN3_6, "{'type': 'image_url', 'image_url': 's3://a/b'}", "found an address: fetch it first"},
    {SAMPLE_IMAGES, CHAT_QWEN3_6, "{'type': 'image', 'url': 'data:image/png;base64,AA'}", "found its bytes in the"},
    {SAMPLE_IMAGES, CHAT_QWEN3_6, "{'type': 'image', 'image': ''}", "found an empty one"},
    {SAMPLE_IMAGES, CHAT_QWEN3_6, "{'type': 'video', 'video': 'a.mp4'}", "message 1: has a video"},
    {SAMPLE_IMAGES, CHAT_QWEN3, "{'type': 'image', 'image': 'one.png'}", "the chat template qwen3 has no images"},
    {SAMPLE_FORM, CHAT_QWEN3_6, "{'type': 'image'}", "\"images\", found none"},
    {SAMPLE_MARKER, CHAT_QWEN3_6, "{'type': 'text', 'text': 'a<|image_pad|>'}", "the special token <|image_pad|>"},
    {SAMPLE_MARKER, CHAT_QWEN3_6, "{'type': 'text', 'text': '<|vision_start|>'}", "the special token <|vision_start|>"},
};

static void test_unseen(Test* t) {
    Sets s;
    int n_looks = 0;
    const ImageMeasure measure = {&n_looks, image_tokens, PAD, 0}, other = {&n_looks, image_tokens, PAD + 1, 0};
    for (size_t i = 0; i < sizeof unseen / sizeof unseen[0]; i++) {
        char lines[1000];
        if (!sets_see(t, &s, 0, TRUNCATE_DROP, &measure)) { return; }
        s.t.kind = unseen[i].kind;
        snprintf(lines, sizeof lines, GOOD "{'messages': [{'role': 'user', 'content': [%s]}, {'role': 'assistant', "
                 "'content': 'b'}]}", unseen[i].content);
        TempPath path = sets_file(&s, "a.jsonl", lines);
        conversations_read(&s.c, path.s);
        const char* why = s.c.named[unseen[i].reason][0];
        check(t, s.c.n == 1 && why && strstr(why, unseen[i].text) && strstr(why, "a.jsonl:2: "), "%s: %s",
              unseen[i].content, why ? why : "another reason");
        sets_free(&s);
    }
    for (int i = 0; i < 2; i++) {  // a model that reads none, and the tokenizer of another one
        if (!sets_see(t, &s, 0, TRUNCATE_DROP, i ? &other : NULL)) { return; }
        TempPath path = sets_file(&s, "a.jsonl", GOOD "{'image': 'one.png', 'instruction': '<image>', 'output': 'b'}");
        conversations_read(&s.c, path.s);
        const char* why = s.c.named[SAMPLE_IMAGES][0];
        check(t, s.c.n == 1 && why && strstr(why, i ? "is token 787, found another" : "this model reads none"), "%s",
              why ? why : "another reason");
        sets_free(&s);
    }
}

// at every length: an image of a sample that is used is there whole, and none is lost with an end that is cut off
static void test_cut_images(Test* t) {
    Sets s;
    int n_looks = 0, n_used = 0, whole = 0;
    const ImageMeasure measure = {&n_looks, image_tokens, PAD, 0};
    for (int most = 0; most <= whole; most++) {  // 0: any number
        if (!sets_see(t, &s, most, TRUNCATE_END, &measure)) { return; }
        TempPath path = sets_file(
            &s, "a.jsonl", "{'instruction': 'z', 'output': 'y'}\n{'images': ['pics/three.png', 'a five.png'], "
                           "'messages': [{'role': 'user', 'content': '<image>?'}, {'role': 'assistant', 'content': "
                           "'a'}, {'role': 'user', 'content': '<image>!'}, {'role': 'assistant', 'content': 'bcdefg "
                           "hijk'}]}");
        if (most == 0) {
            conversations_read(&s.c, path.s);
            whole = (int)s.c.n_longest;
            check(t, s.c.n == 2 && s.c.n_images == 2, "%lld samples, %lld images", (long long)s.c.n,
                  (long long)s.c.n_images);
        } else {
            conversations_read_file_(&s.c, path.s);
            const int is_used = s.c.n_longest > 20 && s.c.n_images > 0;
            const SampleImage* last = is_used ? &s.c.images[1] : NULL;
            check(t, s.c.n_images == 0 || s.c.n_images == 2, "%d: %lld images", most, (long long)s.c.n_images);
            check(t, !is_used || last->at + 5 < s.c.starts[s.c.n], "%d: an image is cut", most);
            n_used += is_used;
        }
        sets_free(&s);
    }
    check(t, n_used > 3 && n_used < 15, "used at %d lengths", n_used);
}

// ---- are image files what they were? ----

// writes a file with the times that another has had
static void put_back(const char* path, const char* text, const struct stat* was) {
    const struct timespec times[2] = {was->st_atim, was->st_mtim};
    FILE* file = fopen(path, "wb");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) { fail_run("%s: cannot be written", path); }
    if (utimensat(AT_FDCWD, path, times, 0) != 0) { fail_run("%s: cannot be touched", path); }
}

static void test_touched(Test* t) {
    TempPath folder = temp_folder(), paths[3];
    ImageFiles files = {NULL, NULL, 0, 0};
    TokenImages images;
    ErrorText error;
    int n_looks = 0;
    const ImageMeasure measure = {&n_looks, image_tokens, PAD, 0};
    RowImage* of = (RowImage*)malloc_check(sizeof(RowImage) * 4, "images");
    for (int i = 0; i < 4; i++) {  // the last is the first again
        char name[8] = {(char)('a' + i % 3), '\0'}, text[8] = {(char)('1' + i % 3), '\0'};
        if (i < 3) { paths[i] = temp_file(&folder, name, text, 1); }
        const int file = image_files_find(&files, paths[i % 3].s, &measure, &error);
        const RowImage one = {30 - 10 * i, files.of[file].n_tokens, files.of[file].path};
        of[i] = one;
    }
    token_images_init(&images, of, 4, &files);
    image_files_free(&files);
    check(t, n_looks == 3 && images.n_files == 3 && token_images_placeholders(&images) == 7 &&
                 token_images_bytes(&images) == 3 && strcmp(images.of[0].path, paths[0].s) == 0 &&
                 images.of[3].path == images.of[0].path, "%d files, %lld placeholders", images.n_files,
          (long long)token_images_placeholders(&images));
    const uint64_t sum = token_images_checksum(&images), stamps = token_images_stamps(&images, 1);
    const uint64_t sizes = token_images_stamps(&images, 0);
    const struct stat was = images.files[1].opened;
    check(t, !token_images_changed(&images) && !token_images_touched(&images), "nobody has touched them");
    chmod(paths[2].s, 0600);
    check(t, !token_images_changed(&images) && token_images_touched(&images) && !token_images_touched(&images) &&
                 token_images_checksum(&images) == sum, "a mode says so once, and bytes are the same");
    put_back(images.files[1].path, "7", &was);
    check(t, !token_images_changed(&images) && token_images_touched(&images) && token_images_checksum(&images) != sum &&
                 token_images_stamps(&images, 1) == stamps, "other bytes, the time put back");
    put_back(images.files[1].path, "3", &was);  // as it was: in the order of the rows a, c, b
    check(t, token_images_checksum(&images) == sum, "the old bytes are back");
    put_back(images.files[1].path, "33", &was);
    check(t, token_images_changed(&images) == images.files[1].path, "another size");
    remove(images.files[1].path);
    check(t, token_images_changed(&images) == images.files[1].path, "a file that is gone");
    token_images_touched(&images);
    temp_file(&folder, "c", "3", 1);
    check(t, token_images_changed(&images) == images.files[1].path, "another time");
    check(t, token_images_checksum(&images) == sum && sizes != stamps, "... of the same bytes");
    token_images_free(&images);
    temp_remove(&folder);
}

static void test_path(Test* t) {
    const struct { const char *text, *path; } cases[] = {
        {"a.png", "data/a.png"}, {"/a b", "/a b"}, {"../a%20b", "data/../a%20b"}, {"file:///a%20b%2", "/a b%2"},
        {"FILE://a", "data/a"}, {"file://localhost/a", "/a"}, {"a:/b", "data/a:/b"},
        {"file:///%00%e9%zz", "/%00\xe9%zz"},
        {"http://a", NULL}, {"HTTPS://a/b.png", NULL}, {"gs+x://a", NULL}, {"data:a", NULL}, {"", NULL},
        {"file://", NULL}};
    char path[PATH_BYTES], *long_one = (char*)new_array(PATH_BYTES + 9, 1);
    ErrorText error;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int ok = image_path(path, "data", cases[i].text, &error);
        check(t, ok == (cases[i].path != NULL) && (!ok || strcmp(path, cases[i].path) == 0), "%s: %s", cases[i].text,
              ok ? path : error.text);
    }
    for (int n = PATH_BYTES - 7; n < PATH_BYTES + 8; n++) {
        memset(long_one, 'a', (size_t)n);
        check(t, image_path(path, "data", long_one, &error) == (n + 5 < PATH_BYTES), "a path of %d bytes", n);
    }
    free(long_one);
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

// an image in about every second sample; image file i has i + 1 placeholders
static void sets_show(Conversations* c, uint64_t* random) {
    enum { FILES = 40 };
    c->images = (SampleImage*)malloc_check(sizeof(SampleImage) * (size_t)c->n, "images");
    for (int i = 0; i < FILES; i++) {
        char path[40];
        snprintf(path, sizeof path, "image %d", i + 1);
        image_files_grow_(&c->files);
        ImageFile file = {string_copy(path), i + 1, {0}};
        c->files.of[i] = file;
        *image_files_slot_(&c->files, path) = c->files.n++;
    }
    for (int64_t i = 0; i < c->n; i++) {
        const uint32_t room = (uint32_t)(c->starts[i + 1] - c->starts[i]) - 2, n = 1 + xorshift_u32(random) % room;
        const SampleImage one = {c->starts[i] + 1 + xorshift_u32(random) % (room - n + 1), (int)n - 1};
        if (xorshift_u32(random) % 2) { c->images[c->n_images++] = one; }
    }
}

// The images of samples first .. first + n - 1 stand where their tokens do, row by row
static void check_images(Test* t, const Conversations* c, int first, int n, const DataLoader* rows, const int* inputs) {
    const TokenImages* images = &rows->data->images;
    int64_t n_expected = 0, n_found = 0;
    for (int64_t i = 0; i < c->n_images; i++) {
        const int64_t at = c->images[i].at;
        if (at < c->starts[first] || at >= c->starts[first + n]) { continue; }
        n_expected++;
        int n_here = 0;
        for (int64_t k = 0; k < images->n; k++) {
            const RowImage* image = &images->of[k];
            const int is = inputs[image->position] == conversations_id(c->tokens[at]);
            n_here += is && image->n == c->images[i].file + 1 && atoi(image->path + 6) == image->n;
        }
        check(t, n_here == 1, "image %lld stands in %d places", (long long)i, n_here);
    }
    for (int64_t r = 0; r < rows->n_rows; r++) {
        int64_t begin, n_of_row;
        const RowImage* image = dataloader_images(rows, r, &begin, &n_of_row);
        check(t, begin == r * rows->T, "row %lld begins at %lld", (long long)r, (long long)begin);
        for (int64_t k = 0; k < n_of_row; k++) {
            check(t, image + k == images->of + n_found + k, "row %lld has other images", (long long)r);
            check(t, image[k].position >= begin && image[k].position + image[k].n <= begin + rows->T,
                  "row %lld: an image lies outside of it", (long long)r);
        }
        n_found += n_of_row;
    }
    check(t, images->n == n_expected && n_found == n_expected, "expected %lld images, found %lld, in rows %lld",
          (long long)n_expected, (long long)images->n, (long long)n_found);
}

static void sets_close(Conversations* c) {
    image_files_free(&c->files);
    free(c->images);
    free(c->tokens);
    free(c->starts);
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
    check_images(t, c, first, n, &rows, inputs);
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
        sets_show(&c, &random);
        const int first = round % 2 ? n / 3 : 0;
        check_packed(t, &c, first, n - first, T, (uint64_t)round);
        sets_close(&c);
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
        {"images", "are measured once and stand as so many placeholders, never learned", test_images},
        {"unseen", "images that cannot be used leave a sample out, by reason", test_unseen},
        {"cut images", "a cut takes no image along", test_cut_images},
        {"path", "from the folder of the conversations; addresses are none", test_path},
        {"touched", "an image that is another or gone is noticed", test_touched},
        {"files", "folders, lists, archives; nothing to read is refused", test_files},
        {"pack", "each sample stands in the rows once, in a segment of its own", test_pack},
        {"pack alone", "without sharing rows each sample has its own", test_pack_alone},
        {"pack order", "is that of the key; less than 1% of 2,000 samples' rows is filled up", test_pack_order},
    };
    json_never_null();
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
