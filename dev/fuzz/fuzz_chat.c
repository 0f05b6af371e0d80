/*
libFuzzer on what chat templates and conversations are read from: templates in Jinja, gzip archives, lines of JSON. Any
bytes are refused with a reason, or what was accepted is whole: a template has a kind, a sample ends with a token that is
learned, and its tokens are the bytes of the text that was made of it.
    make build/fuzz/fuzz_chat
    mkdir -p build/fuzz/corpus_chat && build/fuzz/fuzz_chat -max_total_time=60 -max_len=2048 -dict=dev/fuzz/chat.dict \
        build/fuzz/corpus_chat dev/fuzz/corpus/chat
The first byte picks the reader, of a line the second one the template: `0` Jinja, `1` gzip, `2` and `3` a line.
*/
#include "llmc/text/conversations.h"

enum { MOST_TOKENS = 300 };

static void require_reason(const ErrorText* error) {
    if (error->text[0] == '\0' || strchr(error->text, '\n')) { __builtin_trap(); }
}

static void try_template(const unsigned char* bytes, size_t n_bytes) {
    ChatTemplate t;
    ErrorText error = {""};
    if (!chat_template_recognise(&t, (const char*)bytes, n_bytes, &error)) {
        require_reason(&error);
        return;
    }
    if (t.kind >= N_CHAT_KINDS || (t.kind == CHAT_QWEN2 && !t.system)) { __builtin_trap(); }
    chat_template_free(&t);
}

static void try_gzip(const unsigned char* bytes, size_t n_bytes) {
    ByteBuffer out = {NULL, 0, 0};
    ErrorText error = {""};
    if (!gunzip(&out, bytes, n_bytes, "input", &error)) { require_reason(&error); }
    buffer_free(&out);
}

// the sample that was read: tokens of the text, as many as allowed, the last one learned, the first two not
static void require_sample(const Conversations* c) {
    int n;
    const int* tokens = conversations_sample(c, 0, &n);
    if (n < 3 || n > MOST_TOKENS || tokens[n - 1] < 0 || tokens[0] >= 0 || tokens[1] >= 0) { __builtin_trap(); }
    for (int i = 0; i < n; i++) {
        if (conversations_id(tokens[i]) != c->text.text.bytes[i]) { __builtin_trap(); }  // a token is a byte
    }
}

static void try_line(const unsigned char* bytes, size_t n_bytes, ChatKind kind) {
    ChatTemplate t;
    Tokenizer k;
    Conversations c;
    ErrorText error = {""};
    JsonLines lines = {bytes, n_bytes, 0, 0, NULL};
    tokenizer_bytes_init(&k);
    chat_template_init(&t, kind);
    conversations_init(&c, &t, &k, MOST_TOKENS, TRUNCATE_END);
    const int found = json_lines_row(&lines, "{}", &error);
    if (found < 0) { require_reason(&error); }
    if (found > 0 && conversations_add_row_(&c, lines.row, &error)) { require_sample(&c); }
    else if (found > 0) { require_reason(&error); }
    if (found > 0 && (c.n == 1) != (c.text.reason == SAMPLE_GOOD)) { __builtin_trap(); }
    json_lines_close(&lines);
    conversations_free(&c);
    chat_template_free(&t);
    tokenizer_free(&k);
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    if (n_bytes < 3) { return 0; }
    const int reader = bytes[0] % 4;
    const ChatKind kind = (ChatKind)(bytes[1] % N_CHAT_KINDS);
    const size_t skipped = reader < 2 ? 1 : 2;
    n_bytes -= skipped;
    unsigned char* exact = (unsigned char*)memcpy(malloc_check(n_bytes, "input"), bytes + skipped, n_bytes);
    if (reader == 0) { try_template(exact, n_bytes); }
    else if (reader == 1) { try_gzip(exact, n_bytes); }
    else { try_line(exact, n_bytes, kind); }
    free(exact);
    return 0;
}
