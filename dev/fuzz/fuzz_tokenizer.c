/*
libFuzzer on tokenizer.json: any bytes are refused with one line, or become a tokenizer that encodes and decodes whatever it
is given; every id it gives is one of its own, and a stream of tokens gives the same text as all of them at once.
    make build/fuzz/fuzz_tokenizer
    mkdir -p build/fuzz/corpus_tokenizer && build/fuzz/fuzz_tokenizer -max_total_time=60 -max_len=2048 -close_fd_mask=3 \
        -dict=dev/fuzz/tokenizer.dict build/fuzz/corpus_tokenizer dev/fuzz/corpus/tokenizer
An input is a file, a byte 0, and a text to encode; without the byte 0 a text of our own is used. In the file the first byte
1 stands for the 256 tokens of a byte-level vocabulary, "!":0,..., the first byte 2 for "<0x00>":0,... of byte_fallback.
The Unicode tables are the same for every file, and the table of characters is 4.4 MB of nearly nothing but zeros: both
stay where they are from one input to the next. With the parser's block of memory and one short text for each input this
makes runs six times faster.
*/
#include "../../llmc/text/unicode.h"
#include <jansson.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

static void fuzz_unicode_init(Unicode* u) {
    static Unicode shared;
    if (!shared.flags) { unicode_init(&shared); }
    *u = shared;
}

// char_ids; a page that nobody may touch lies behind it
static void* fuzz_characters(void) {
    static char* table;
    const size_t n_bytes = UNICODE_CODES * sizeof(int32_t), guard = 4096;
    if (!table) {
        table = (char*)mmap(NULL, n_bytes + guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (table == MAP_FAILED || mprotect(table + n_bytes, guard, PROT_NONE) != 0) { fail_run("no memory"); }
    }
    return table;
}

static void* fuzz_calloc(size_t n, size_t n_bytes) { return n == UNICODE_CODES ? fuzz_characters() : calloc(n, n_bytes); }

static void fuzz_free(void* p) {
    if (p && p == fuzz_characters()) {
        madvise(p, UNICODE_CODES * sizeof(int32_t), MADV_DONTNEED);  // zeros again
    } else {
        free(p);
    }
}

// The objects of the JSON parser: one after the other in a block that is forgotten after the file was read. They are counted,
// so that a leak is seen, and the sanitizer is told that nobody may look at the block afterwards.
typedef struct {
    char bytes[1 << 20];
    size_t used;
    int n_living;
} JsonBlock;

static JsonBlock* json_block(void) {
    static JsonBlock block;
    return &block;
}

static void* json_block_malloc(size_t n_bytes) {
    JsonBlock* b = json_block();
    size_t n = (n_bytes + 15) / 16 * 16;
    if (n > sizeof b->bytes - b->used) { return NULL; }
    b->n_living++;
    return b->bytes + (b->used += n) - n;
}

static void json_block_free(void* p) { json_block()->n_living -= p != NULL; }

static void json_block_open(void) {
    JsonBlock* b = json_block();
    ASAN_UNPOISON_MEMORY_REGION(b->bytes, b->used);
    b->used = 0;
    json_set_alloc_funcs(json_block_malloc, json_block_free);
}

static void json_block_close(void) {
    if (json_block()->n_living != 0) { __builtin_trap(); }
    ASAN_POISON_MEMORY_REGION(json_block()->bytes, json_block()->used);
}

#define unicode_init(u) fuzz_unicode_init(u)
#define unicode_free(u) ((void)(u))
#define calloc(n, n_bytes) fuzz_calloc(n, n_bytes)
#define free(p) fuzz_free(p)
#include "../../llmc/text/tokenizer.h"

enum { MAX_TEXT = 128 };  // a normalizer may make 64 times as much of it

static void require(int promise) {
    if (!promise) { __builtin_trap(); }
}

static void try_text(const Tokenizer* t, const char* text, size_t n_bytes, int choices) {
    TokenizerWork w;
    TokenStream stream;
    ByteBuffer streamed = {NULL, 0, 0};
    size_t n_decoded, n_more;
    tokenizer_work_init(&w, t, n_bytes);
    int n = tokenizer_encode_with(t, &w, text, n_bytes, choices);
    for (int i = 0; i < n; i++) { require(w.tokens[i] >= 0 && w.tokens[i] < t->n_tokens); }
    char* decoded = tokenizer_decode(t, w.tokens, n, &n_decoded);
    token_stream_init(&stream, t, 0);
    for (int i = 0; i <= n; i++) {
        const char* more = i < n ? token_stream_put(&stream, w.tokens[i], &n_more) : token_stream_end(&stream, &n_more);
        buffer_append(&streamed, more, n_more);
    }
    require(streamed.n == n_decoded && (n_decoded == 0 || memcmp(streamed.bytes, decoded, n_decoded) == 0));
    require(utf8_valid_prefix((const unsigned char*)decoded, n_decoded) == n_decoded);
    token_stream_free(&stream);
    buffer_free(&streamed);
    free(decoded);
    tokenizer_work_free(&w);
}

// the 256 entries of a vocabulary, one for each byte
static const ByteBuffer* byte_entries(int byte_level) {
    static ByteBuffer lists[2];
    ByteBuffer* out = &lists[byte_level];
    int is_new = out->n == 0;
    char entry[32];
    short to_byte[N_BYTE_CHARS];
    if (is_new) { pipeline_byte_characters_(to_byte); }
    for (int code = 0, id = 0; is_new && id < 256; code++) {
        unsigned char name[5] = "";
        utf8_put(name, (uint32_t)code);
        if (byte_level && to_byte[code] < 0) { continue; }
        const char *comma = id > 0 ? "," : "", *backslash = code == '"' || code == '\\' ? "\\" : "";
        int n = byte_level ? sprintf(entry, "%s\"%s%s\":%d", comma, backslash, (char*)name, id)
                           : sprintf(entry, "%s\"<0x%02X>\":%d", comma, id, id);
        buffer_append(out, entry, (size_t)n);
        id++;
    }
    return out;
}

// the file of an input: a block of exactly its size
static unsigned char* file_of(const unsigned char* bytes, size_t* n_bytes) {
    ByteBuffer file = {NULL, 0, 0};
    int n_seen[3] = {0, 0, 0};
    for (size_t i = 0; i < *n_bytes; i++) {
        if ((bytes[i] == 1 || bytes[i] == 2) && n_seen[bytes[i]]++ == 0) {
            const ByteBuffer* entries = byte_entries(bytes[i] == 1);
            buffer_append(&file, entries->bytes, entries->n);
        } else {
            buffer_append(&file, bytes + i, 1);
        }
    }
    *n_bytes = file.n;
    return (unsigned char*)realloc_check(file.bytes, file.n, "input");
}

int LLVMFuzzerTestOneInput(const unsigned char* bytes, size_t n_bytes) {
    const char* own = "Hello the <s> abc\t\xc3\xa9" "e\xcc\x81\xff 123\n\n  \xe4\xb8\xad\xf0\x9f\x98\x80 <|endoftext|>'ll";
    const unsigned char* zero = n_bytes > 0 ? (const unsigned char*)memchr(bytes, 0, n_bytes) : NULL;
    size_t n_file = zero ? (size_t)(zero - bytes) : n_bytes;
    Tokenizer t;
    ErrorText error = {""};
    int choices = zero ? (int)(n_bytes % 4) : 3;
    size_t n_text = zero ? n_bytes - n_file - 1 : strlen(own);
    unsigned char* file = file_of(bytes, &n_file);
    json_block_open();
    int ok = tokenizer_parse_json_(&t, file, n_file, &error);
    json_block_close();
    if (ok) {
        try_text(&t, zero ? (const char*)zero + 1 : own, n_text < MAX_TEXT ? n_text : MAX_TEXT, choices);
        tokenizer_free(&t);
    } else {
        require(error.text[0] != '\0' && !strchr(error.text, '\n'));
    }
    free(file);
    return 0;
}
