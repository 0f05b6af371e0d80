/*
libFuzzer on what chat templates and conversations are read from: templates in Jinja, gzip archives, lines of JSON. Any
bytes are refused with a reason, or what was accepted is whole: a template has a kind, a sample ends with a token that
is learned, and its tokens are the bytes of the text that was made of it; an image in it stands as so many
placeholders.
    make build/fuzz/fuzz_chat
    mkdir -p build/fuzz/corpus_chat && build/fuzz/fuzz_chat -max_total_time=60 -max_len=2048 -dict=dev/fuzz/chat.dict \
        build/fuzz/corpus_chat dev/fuzz/corpus/chat
The first byte picks the reader, of a line the second one the template, `0` to `;` in the order of ChatKind: `0` Jinja,
`1` gzip, `2` a line for a model that reads images, `3` for one that does not. Images are files that are there, as
LICENSE where the program is started in the root of the repository; none is opened.
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

// ---- a tokenizer of bytes that has the tokens around images ----

enum { PAD = 257 };
static const char* const vision[] = {CHAT_VISION_BEGIN, CHAT_IMAGE_PAD, CHAT_VISION_END};  // 256 and on

// bytes as GPT-2 writes them in a vocabulary
static void add_byte(json_t* vocabulary, int byte, int* n_others) {
    const int is_plain = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = is_plain ? byte : 256 + (*n_others)++;
    char name[3] = {(char)code, '\0', '\0'};
    if (code > 127) {
        name[0] = (char)(0xc0 | code >> 6);
        name[1] = (char)(0x80 | (code & 63));
    }
    json_object_set_new(vocabulary, name, json_integer(byte));
}

static const Tokenizer* tokenizer_of_images(void) {
    static Tokenizer k;
    static char* text;  // it looks into that
    ErrorText error;
    int n_others = 0;
    if (text) { return &k; }
    json_t *vocabulary = json_object(), *added = json_array();
    for (int i = 0; i < 256; i++) { add_byte(vocabulary, i, &n_others); }
    for (int i = 0; i < 3; i++) {
        json_array_append_new(added, json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", 256 + i, "content",
                                               vision[i], "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0,
                                               "special", 1));
    }
    json_t* file = json_pack("{s:o, s:n, s:{s:s, s:b, s:b, s:b}, s:n, s:{s:s, s:b, s:b, s:b}, s:{s:s, s:o, s:[]}}",
                             "added_tokens", added, "normalizer", "pre_tokenizer", "type", "ByteLevel",
                             "add_prefix_space", 0, "trim_offsets", 0, "use_regex", 0, "post_processor", "decoder",
                             "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0, "use_regex", 0, "model",
                             "type", "BPE", "vocab", vocabulary, "merges");
    text = json_dumps(file, 0);
    json_decref(file);
    if (!tokenizer_parse_json_(&k, (const unsigned char*)text, strlen(text), &error)) { fail_run("%s", error.text); }
    return &k;
}

static int image_tokens(void* of, const char* path, ErrorText* error) {
    (void)of, (void)error;
    return 1 + (int)(strlen(path) % 5);
}

// ---- samples ----

// Of the sample that was read: as many tokens as allowed, the last one learned, the first two not, each a byte of the
// text or one of its marks; an image's placeholders, which are none of them learned
static void require_sample(const Conversations* c) {
    const unsigned char* text = c->text.text.bytes;
    int n, image = 0;
    const int* tokens = conversations_sample(c, 0, &n);
    if (n < 3 || n > MOST_TOKENS || tokens[n - 1] < 0 || tokens[0] >= 0 || tokens[1] >= 0) { __builtin_trap(); }
    for (int i = 0; i < n; i++) {
        const int id = conversations_id(tokens[i]);
        if (id < 256) {
            if (id != *text++) { __builtin_trap(); }
            continue;
        }
        if (memcmp(text, vision[id - 256], strlen(vision[id - 256])) != 0) { __builtin_trap(); }
        text += strlen(vision[id - 256]);
        if (id != PAD) { continue; }
        const SampleImage* found = &c->images[image++];
        const int n_pads = c->files.of[found->file].n_tokens;
        if (image > c->n_images || found->at != i || i + n_pads >= n) { __builtin_trap(); }
        for (int end = i + n_pads; i < end; i++) {
            if (tokens[i] != ~PAD) { __builtin_trap(); }
        }
        i--;
    }
    if (image != c->n_images) { __builtin_trap(); }
}

static void try_row(Conversations* c, const unsigned char* bytes, size_t n_bytes) {
    ErrorText error = {""};
    JsonLines lines = {bytes, n_bytes, 0, 0, NULL};
    const int found = json_lines_row(&lines, "{}", &error);
    if (found < 0) { require_reason(&error); }
    if (found > 0 && conversations_add_row_(c, lines.row, &error)) { require_sample(c); }
    else if (found > 0) { require_reason(&error); }
    if (found > 0 && (c->n == 1) != (c->text.reason == SAMPLE_GOOD)) { __builtin_trap(); }
    json_lines_close(&lines);
}

static void try_line(const unsigned char* bytes, size_t n_bytes, ChatKind kind) {
    ChatTemplate t;
    Tokenizer k;
    Conversations c;
    tokenizer_bytes_init(&k);
    chat_template_init(&t, kind);
    conversations_init(&c, &t, &k, MOST_TOKENS, TRUNCATE_END);
    try_row(&c, bytes, n_bytes);
    conversations_free(&c);
    chat_template_free(&t);
    tokenizer_free(&k);
}

// the room that its tokenizer takes stays for the next line, as it does in a file
static void try_line_of_images(const unsigned char* bytes, size_t n_bytes, ChatKind kind) {
    static const ImageMeasure measure = {NULL, image_tokens, PAD, 0};
    static Conversations c;
    ChatTemplate t;
    chat_template_init(&t, kind);
    if (!c.starts) { conversations_init(&c, &t, tokenizer_of_images(), MOST_TOKENS, TRUNCATE_END); }
    c.t = &t;
    c.measure = &measure;
    strcpy(c.folder, ".");
    try_row(&c, bytes, n_bytes);
    c.n = c.n_images = 0;
    chat_template_free(&t);
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
    else if (reader == 2) { try_line_of_images(exact, n_bytes, kind); }
    else { try_line(exact, n_bytes, kind); }
    free(exact);
    return 0;
}
