/*
Tokenizer: text to token ids and back.
    "bytes"              256 tokens, one for each byte, and id 256 = end of text; needs no file, loses nothing. A
                         tokenizer.json that says the same, as tokenizer_save writes it, is this tokenizer again
    tokenizer.json       of Hugging Face tokenizers: BPE as GPT-2, Qwen and Mistral have it (tokenizer_json.h), same ids
    gpt2_tokenizer.bin   of llm.c: the bytes of each token, so it decodes but cannot encode
    offset      size   meaning of gpt2_tokenizer.bin, little-endian
    0           4      magic 20240328
    4           4      version 1 or 2
    8           4      number of tokens n
    12          4      id of end of text (version 2; version 1 means 50256)
    16          1008   0
    1024        rest   n times: 1 byte length >= 1, then that many bytes; the file ends with the last
    tokenizer_open            any of them by name: "bytes", a file, or a folder that holds a tokenizer.json
    tokenizer_is              is it the one that this text of a tokenizer.json means?
    tokenizer_encode          a text's tokens, those of the template (<s>) included
    tokenizer_encode_plain    without the template: a document of training data, before which comes end of text
    tokenizer_encode_with     the same with a workspace that the caller keeps, for many short texts; and the choices
                              below
    tokenizer_encode_to       the same for a text of any length: the caller gets its tokens piece by piece
    tokenizer_decode          the text of tokens, as Hugging Face's decode(ids, skip_special_tokens=False)
    TokenStream               the same token by token: what is certain comes out at once, the rest is held back
    tokenizer_save            tokenizer.json into the folder of a model, for transformers and for us
    tokenizer_save_config     tokenizer_config.json, where the model came without one
A Tokenizer is read by any number of threads at the same time; a TokenizerWork or a TokenStream belongs to one.
Text is UTF-8. For a tokenizer.json what is not UTF-8 becomes U+FFFD before encoding, in decoded text as well.
Errors: fail_input for a file that breaks a rule; encoding with a tokenizer that cannot; a text of 2 GiB or more.
Source: the format of karpathy/llm.c; huggingface/tokenizers.
*/
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H
#include "../core/fail.h"         // fail_input
#include "../core/mapfile.h"      // MappedFile, file_map_or_not, file_unmap, file_looks_like, ErrorText, error_set
#include "../core/jsonfile.h"     // json_write
#include "../files/checkpoint.h"  // SavedFiles, path_join
#include "tokenizer_json.h"       // pipeline_parse_, pipeline_encode, TokenizerPipeline, EncodeWork, ByteBuffer

#define BYTES_EOT_TEXT "<|endoftext|>"  // end of text of the byte tokenizer, in a tokenizer.json

// choices of tokenizer_encode_with
enum {
    TOKENIZER_TEMPLATE = 1,  // put the tokens of the template around the text
    // "<|im_end|>" in the text is that token; without, it is a text like any other: for what users type
    TOKENIZER_ADDED = 2
};
typedef EncodeWork TokenizerWork;

typedef struct Tokenizer {
    const char* kind;      // "bytes", "tokenizer.json", "gpt2_tokenizer.bin"
    int n_tokens;          // ids are 0 .. n_tokens-1
    int eot;               // end of text: stands before each document; -1: the file names none, see tokenizer_need_eot
    unsigned char* bytes;  // of all tokens, one after the other
    uint32_t* starts;      // (n_tokens + 1) token i is bytes[starts[i] .. starts[i+1])
    int cut_anywhere;      // the tokens of a text are those of its pieces, wherever it is cut
    void (*encode)(TokenizerWork* w, const char* text, size_t n_bytes, int choices);  // appends to w->tokens; or NULL
    TokenizerPipeline* pipeline;  // of a tokenizer.json, or NULL; then bytes and starts are the pipeline's
    // the text of a tokenizer.json that tokenizer_open read: it goes along with checkpoints and exports
    char* json;
    size_t n_json;
} Tokenizer;

static inline void tokenizer_bytes_encode_(TokenizerWork* w, const char* text, size_t n_bytes, int choices) {
    (void)choices;
    w->tokens = (int*)realloc_check(w->tokens, n_bytes * sizeof(int), "tokens");
    for (size_t i = 0; i < n_bytes; i++) { w->tokens[i] = (unsigned char)text[i]; }
    w->n_tokens = w->capacity = n_bytes;
}

static inline void tokenizer_bytes_init(Tokenizer* t) {
    memset(t, 0, sizeof *t);
    t->kind = "bytes";
    t->n_tokens = 257;
    t->eot = 256;  // stands for no byte
    t->cut_anywhere = 1;
    t->encode = tokenizer_bytes_encode_;
    t->bytes = (unsigned char*)malloc_check(256, "byte tokenizer");
    t->starts = (uint32_t*)malloc_check(258 * sizeof(uint32_t), "byte tokenizer");
    for (int i = 0; i < 258; i++) { t->starts[i] = i < 256 ? (uint32_t)i : 256; }
    for (int i = 0; i < 256; i++) { t->bytes[i] = (unsigned char)i; }
}

static inline void tokenizer_free(Tokenizer* t) {
    if (t->pipeline) {
        pipeline_free(t->pipeline);
        free(t->pipeline);
    } else {
        free(t->bytes);
        free(t->starts);
    }
    free(t->json);
    memset(t, 0, sizeof *t);
}

// magic, version, number of tokens and end of text, against each other and the file's size
static inline int tokenizer_bin_header_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    int32_t header[4];  // magic, version, n_tokens, eot
    const char* other = file_looks_like(bytes, n_bytes);
    if (n_bytes >= sizeof header) { memcpy(header, bytes, sizeof header); }
    if (n_bytes < 1024 || header[0] != 20240328) {
        if (other) { return error_set(error, "expected a tokenizer file (gpt2_tokenizer.bin), found %s", other); }
        if (n_bytes < 1024) {
            return error_set(error, "expected a tokenizer file, a header of 1024 bytes, found %zu bytes", n_bytes);
        }
        return error_set(error, "expected a tokenizer file, magic number 20240328, found %d", header[0]);
    }
    if (header[1] != 1 && header[1] != 2) {
        return error_set(error, "expected tokenizer version 1 or 2, found %d", header[1]);
    }
    int eot = header[1] == 1 ? 50256 : header[3];
    size_t most = (n_bytes - 1024) / 2;  // every token takes at least 2 bytes of the file
    if (header[2] < 1 || (size_t)header[2] > most) {
        return error_set(error, "expected 1..%zu tokens in a file of %zu bytes, found %d in the header", most, n_bytes,
                         header[2]);
    }
    if (eot < 0 || eot >= header[2]) {
        return error_set(error, "end of text is token %d, expected 0..%d", eot, header[2] - 1);
    }
    t->n_tokens = header[2];
    t->eot = eot;
    return 1;
}

// the table that follows the header, into t->bytes and t->starts
static inline int tokenizer_bin_table_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    size_t at = 1024;
    uint32_t used = 0;
    for (int i = 0; i < t->n_tokens; i++) {
        size_t length = at < n_bytes ? bytes[at] : 0;
        if (length == 0) {
            return error_set(error, "token %d of %d at offset %zu: expected a length of 1..255, found %s", i,
                             t->n_tokens, at, at < n_bytes ? "0" : "the end of the file");
        }
        if (length > n_bytes - at - 1) {
            return error_set(error,
                             "token %d at offset %zu: %zu bytes long, but only %zu follow: the file is cut short, "
                             "copy or download it again", i, at, length, n_bytes - at - 1);
        }
        t->starts[i] = used;
        memcpy(t->bytes + used, bytes + at + 1, length);
        used += (uint32_t)length;
        at += 1 + length;
    }
    t->starts[t->n_tokens] = used;
    if (at != n_bytes) {
        return error_set(error, "%zu bytes follow the last of %d tokens, expected none", n_bytes - at, t->n_tokens);
    }
    return 1;
}

// The whole reader on bytes in memory, without an exit: 1, or 0 with the reason in `error` and nothing left to free.
static inline int tokenizer_parse_bin_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    memset(t, 0, sizeof *t);
    t->kind = "gpt2_tokenizer.bin";
    if (n_bytes > UINT32_MAX) {
        return error_set(error, "expected a tokenizer file below 4 GiB, found %zu bytes", n_bytes);
    }
    if (!tokenizer_bin_header_(t, bytes, n_bytes, error)) { return 0; }
    t->bytes = (unsigned char*)malloc_check(n_bytes - 1024, "tokenizer");
    t->starts = (uint32_t*)malloc_check(((size_t)t->n_tokens + 1) * sizeof(uint32_t), "tokenizer");
    if (tokenizer_bin_table_(t, bytes, n_bytes, error)) { return 1; }
    tokenizer_free(t);
    return 0;
}

// ---- tokenizer.json ----

static inline void tokenizer_json_encode_(TokenizerWork* w, const char* text, size_t n_bytes, int choices) {
    w->n_tokens = 0;
    pipeline_encode(w, text, n_bytes, !(choices & TOKENIZER_ADDED), choices & TOKENIZER_TEMPLATE);
}

// The whole reader on bytes in memory, without an exit: 1, or 0 with the reason in `error` and nothing left to free.
static inline int tokenizer_parse_json_(Tokenizer* t, const unsigned char* bytes, size_t n_bytes, ErrorText* error) {
    memset(t, 0, sizeof *t);
    TokenizerPipeline* p = (TokenizerPipeline*)malloc_check(sizeof *p, "tokenizer");
    if (!pipeline_parse_(p, bytes, n_bytes, error)) {
        free(p);
        return 0;
    }
    t->kind = "tokenizer.json";
    t->pipeline = p;
    t->n_tokens = p->n_tokens;
    t->eot = p->eot;
    t->bytes = p->bytes;
    t->starts = p->starts;
    t->encode = tokenizer_json_encode_;
    return 1;
}

// Byte i is token i and end of text 256, with nothing done to a text before or after? Then it is the byte tokenizer,
// which unlike a tokenizer.json also takes what is no UTF-8. Without merges it does not matter where words end.
static inline int tokenizer_is_bytes_(const TokenizerPipeline* p) {
    int same = p->n_tokens == 257 && p->eot == 256 && p->n_added <= 1 && p->merges.n_merges == 0 && p->byte_level &&
               !p->prefix_space && p->n_normalize == 0 && p->n_before + p->n_after == 0 &&
               p->decode == DECODE_BYTE_LEVEL;
    for (int i = 0; i < 256 && same; i++) { same = p->byte_ids[i] == i; }
    return same;
}

// what --tokenizer means: "bytes", a file, or a folder with a tokenizer.json
static inline void tokenizer_open(Tokenizer* t, const char* name) {
    MappedFile file;
    ErrorText error;
    if (strcmp(name, "bytes") == 0) {
        tokenizer_bytes_init(t);
        return;
    }
    char* path = (char*)malloc_check(strlen(name) + sizeof "/tokenizer.json", "path");
    sprintf(path, "%s%s", name, path_is_folder(name) ? "/tokenizer.json" : "");
    if (!file_map_or_not(&file, path, &error)) {
        fail_input("--tokenizer: %s: %s (expected bytes, a tokenizer.json or the folder it is in)", path, error.text);
    }
    size_t at = 0;
    while (at < file.n_bytes && isspace(file.bytes[at])) { at++; }
    int is_json = at < file.n_bytes && file.bytes[at] == '{';
    int ok = is_json ? tokenizer_parse_json_(t, file.bytes, file.n_bytes, &error)
                     : tokenizer_parse_bin_(t, file.bytes, file.n_bytes, &error);
    if (!ok) { fail_input("%s: %s", path, error.text); }
    if (is_json) {
        const char* left_out = t->pipeline->left_out;
        if (left_out) {
            warn_alike("%s: its %s will not be applied: a text is never cut or filled up", path, left_out);
        }
        if (tokenizer_is_bytes_(t->pipeline)) {
            tokenizer_free(t);
            tokenizer_bytes_init(t);
        }
        t->n_json = file.n_bytes;
        t->json = (char*)memcpy(malloc_check(file.n_bytes, "tokenizer.json"), file.bytes, file.n_bytes);
    }
    file_unmap(&file);
    free(path);
}

// Is it the tokenizer of this text of a tokenizer.json? Of the same text; or both are the byte tokenizer
static inline int tokenizer_is(const Tokenizer* t, const unsigned char* json, size_t n_bytes) {
    Tokenizer other;
    ErrorText unused;
    if (t->json && t->n_json == n_bytes && memcmp(t->json, json, n_bytes) == 0) { return 1; }
    if (strcmp(t->kind, "bytes") != 0 || !tokenizer_parse_json_(&other, json, n_bytes, &unused)) { return 0; }
    const int is_bytes = tokenizer_is_bytes_(other.pipeline);
    tokenizer_free(&other);
    return is_bytes;
}

// the folder of a tokenizer.json that tokenizer_open takes by this name, where files that belong to it are; "" of any
// other tokenizer
static inline const char* tokenizer_folder(char folder[PATH_BYTES], const char* name) {
    *folder = '\0';
    if (strcmp(name, "bytes") == 0) { return folder; }
    if (path_is_folder(name)) { snprintf(folder, PATH_BYTES, "%s", name); }
    else if (strcmp(basename(name), "tokenizer.json") == 0) { path_parent(folder, name); }
    return folder;
}

// end of text, where one is needed
static inline int tokenizer_need_eot(const Tokenizer* t) {
    if (t->eot >= 0) { return t->eot; }
    fail_input("the tokenizer has no end of text: expected <|endoftext|>, <|end_of_text|>, </s>, <eos> or <|im_end|> "
               "among its tokens; add one to added_tokens");
}

// The bytes of a token, not terminated by 0. End of text of the byte tokenizer has none, nor has an id outside the
// vocabulary (a model's padded vocabulary is larger than its tokenizer's).
static inline const char* tokenizer_bytes_of(const Tokenizer* t, int id, int* n_bytes) {
    *n_bytes = 0;
    if (id < 0 || id >= t->n_tokens) { return ""; }
    *n_bytes = (int)(t->starts[id + 1] - t->starts[id]);
    return (const char*)t->bytes + t->starts[id];
}

// bytes of text behind n tokens; end of text is not text
static inline int64_t tokenizer_count_bytes(const Tokenizer* t, const int* tokens, int n) {
    int64_t sum = 0;
    for (int i = 0; i < n; i++) {
        int n_bytes;
        tokenizer_bytes_of(t, tokens[i], &n_bytes);
        sum += tokens[i] == t->eot ? 0 : n_bytes;
    }
    return sum;
}

// ---- encoding ----

// n_bytes: about how long a text will be
static inline void tokenizer_work_init(TokenizerWork* w, const Tokenizer* t, size_t n_bytes) {
    memset(w, 0, sizeof *w);
    if (t->pipeline) { encode_work_init(w, t->pipeline, n_bytes); }
}

static inline void tokenizer_work_free(TokenizerWork* w) { encode_work_free(w); }

// the tokens of a text are w->tokens until the next call; returns their number
static inline int tokenizer_encode_with(const Tokenizer* t, TokenizerWork* w, const char* text, size_t n_bytes,
                                        int choices) {
    if (!t->encode) {
        fail_input("--tokenizer: expected bytes or a tokenizer.json to encode text, found llm.c's %s, which only "
                   "decodes", t->kind);
    }
    if (n_bytes > INT_MAX) {
        fail_input("a text of %zu bytes is too long to encode in one piece: cut it below 2 GiB", n_bytes);
    }
    t->encode(w, text, n_bytes, choices);
    if (w->n_tokens > INT_MAX) { fail_input("a text of %zu bytes gives more than 2^31 tokens: cut it", n_bytes); }
    return (int)w->n_tokens;
}

// the same, and nothing stays: `take` gets the tokens in their order, some ten thousand at once
static inline void tokenizer_encode_to(const Tokenizer* t, TokenizerWork* w, const char* text, size_t n_bytes,
                                       int choices, void (*take)(void* to, const int* tokens, size_t n), void* to) {
    w->take = take;
    w->to = to;
    tokenizer_encode_with(t, w, text, n_bytes, choices);
    encode_work_flush(w);
    w->take = NULL;
}

static inline int tokenizer_encode_once_(const Tokenizer* t, const char* text, size_t n_bytes, int choices,
                                         int** tokens) {
    TokenizerWork w;
    tokenizer_work_init(&w, t, n_bytes);
    int n = tokenizer_encode_with(t, &w, text, n_bytes, choices);
    *tokens = w.tokens ? w.tokens : (int*)malloc_check(0, "tokens");
    w.tokens = NULL;
    tokenizer_work_free(&w);
    return n;
}

// *tokens = the tokens of a text, to be freed by the caller; returns their number
static inline int tokenizer_encode(const Tokenizer* t, const char* text, size_t n_bytes, int** tokens) {
    return tokenizer_encode_once_(t, text, n_bytes, TOKENIZER_TEMPLATE | TOKENIZER_ADDED, tokens);
}

// without the template's tokens: as a document of training data has them
static inline int tokenizer_encode_plain(const Tokenizer* t, const char* text, size_t n_bytes, int** tokens) {
    return tokenizer_encode_once_(t, text, n_bytes, TOKENIZER_ADDED, tokens);
}

// ---- decoding, token by token ----

typedef struct {
    const Tokenizer* t;
    int skip_special;
    int started;      // a token came before
    int n_strip;      // characters that may still be taken from the front
    ByteBuffer held;  // bytes that do not yet make text: a cut character, or a run of byte tokens
    ByteBuffer out;
} TokenStream;

static inline void token_stream_init(TokenStream* s, const Tokenizer* t, int skip_special) {
    memset(s, 0, sizeof *s);
    s->t = t;
    s->skip_special = skip_special;
    s->n_strip = t->pipeline ? t->pipeline->n_strip : 0;
    buffer_reserve(&s->out, 1);
}

static inline void token_stream_free(TokenStream* s) {
    buffer_free(&s->held);
    buffer_free(&s->out);
}

// ByteLevel: all that is held becomes text, but a character whose end may still come stays unless this is the end
static inline void token_stream_characters_(TokenStream* s, int is_end) {
    ByteBuffer* held = &s->held;
    size_t begin = held->n > 3 ? held->n - 3 : 0;  // a cut character has 3 bytes at most
    if (is_end) { begin = held->n; }
    for (; begin < held->n; begin++) {
        uint32_t code;
        int cut;
        if (utf8_decode(held->bytes + begin, held->n - begin, &code, &cut) < 0 && cut) { break; }
    }
    if (begin == 0) { return; }
    utf8_repair(&s->out, held->bytes, begin);
    memmove(held->bytes, held->bytes + begin, held->n - begin);
    held->n -= begin;
}

// ByteFallback: a run of byte tokens is over; valid UTF-8 is text, otherwise each byte is one U+FFFD
static inline void token_stream_run_(TokenStream* s) {
    int valid = utf8_valid_prefix(s->held.bytes, s->held.n) == s->held.n;
    if (valid) { buffer_append(&s->out, s->held.bytes, s->held.n); }
    for (size_t i = 0; i < s->held.n && !valid; i++) { buffer_append_code(&s->out, 0xfffd); }
    s->held.n = 0;
}

// take up to n_strip characters from the front of the first text there is
static inline const char* token_stream_strip_(TokenStream* s, size_t* n_bytes) {
    const TokenizerPipeline* p = s->t->pipeline;
    const char* text = (const char*)s->out.bytes;
    size_t n = s->n_strip ? strlen(p->strip) : 0;
    *n_bytes = s->out.n;
    for (; s->n_strip > 0 && *n_bytes > 0; s->n_strip--) {
        if (*n_bytes < n || memcmp(text, p->strip, n) != 0) {
            s->n_strip = 0;
            break;
        }
        text += n;
        *n_bytes -= n;
    }
    return text;
}

// Give one token; returns the text that is certain now, valid until the next call: *n_bytes, 0 when something must
// follow first.
static inline const char* token_stream_put(TokenStream* s, int id, size_t* n_bytes) {
    const Tokenizer* t = s->t;
    const TokenizerPipeline* p = t->pipeline;
    s->out.n = *n_bytes = 0;
    if (id < 0 || id >= t->n_tokens) { return ""; }
    size_t n = t->starts[id + 1] - t->starts[id];
    if (p && (!(p->flags[id] & TOKEN_EXISTS) || (s->skip_special && p->flags[id] & TOKEN_SPECIAL))) { return ""; }
    if (!p && s->skip_special && id == t->eot) { return ""; }
    int is_byte = p && p->flags[id] & TOKEN_BYTE, is_byte_level = p && p->decode == DECODE_BYTE_LEVEL;
    if (p && p->decode == DECODE_JOIN && s->started) { buffer_append(&s->out, " ", 1); }
    if (!is_byte && !is_byte_level) { token_stream_run_(s); }
    buffer_append(is_byte || is_byte_level ? &s->held : &s->out, t->bytes + t->starts[id], n);
    if (is_byte_level) { token_stream_characters_(s, 0); }
    s->started = 1;
    return token_stream_strip_(s, n_bytes);
}

// The tokens so far were a prompt, which stands there already: what is held of it does not come out again
static inline void token_stream_after_prompt(TokenStream* s) {
    if (utf8_valid_prefix(s->held.bytes, s->held.n) == s->held.n) { s->held.n = 0; }
}

// no token follows: the text that was held back
static inline const char* token_stream_end(TokenStream* s, size_t* n_bytes) {
    s->out.n = 0;
    if (s->t->pipeline && s->t->pipeline->decode == DECODE_BYTE_LEVEL) {
        token_stream_characters_(s, 1);
    } else {
        token_stream_run_(s);
    }
    return token_stream_strip_(s, n_bytes);
}

// Write text to a terminal or a file that somebody will look at: without control characters other than white space, for
// such characters ring the bell or move the cursor. Bytes that are no UTF-8 are written as they are. In pieces,
// which may end inside a character, text_print_safe_end follows the last.
typedef struct {
    FILE* out;
    int is_held;  // the last piece ended with the first byte of what may be U+0080 .. U+009F
} SafeText;

static inline void text_print_safe_end(SafeText* safe) {
    if (safe->is_held) { putc(0xc2, safe->out); }
    safe->is_held = 0;
}

static inline void text_print_safe_piece(SafeText* safe, const char* text, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++) {
        const unsigned char byte = (unsigned char)text[i];
        const int is_control = (byte < ' ' && !(byte >= '\t' && byte <= '\r')) || byte == 127;
        if (safe->is_held && byte >= 0x80 && byte < 0xa0) {
            safe->is_held = 0;
            continue;
        }
        text_print_safe_end(safe);
        if (byte == 0xc2) { safe->is_held = 1; }
        else if (!is_control) { putc(byte, safe->out); }
    }
}

static inline void text_print_safe(const char* text, size_t n_bytes, FILE* out) {
    SafeText safe = {out, 0};
    text_print_safe_piece(&safe, text, n_bytes);
    text_print_safe_end(&safe);
}

// The text of tokens, to be freed by the caller; a 0 follows its n_bytes. Ids outside the vocabulary give nothing.
static inline char* tokenizer_decode_with(const Tokenizer* t, const int* ids, int n, int skip_special,
                                          size_t* n_bytes) {
    TokenStream stream;
    ByteBuffer text = {NULL, 0, 0};
    token_stream_init(&stream, t, skip_special);
    for (int i = 0; i <= n; i++) {
        size_t n_more;
        const char* more = i < n ? token_stream_put(&stream, ids[i], &n_more) : token_stream_end(&stream, &n_more);
        buffer_append(&text, more, n_more);
    }
    token_stream_free(&stream);
    buffer_append(&text, "", 1);
    *n_bytes = text.n - 1;
    return (char*)text.bytes;
}

static inline char* tokenizer_decode(const Tokenizer* t, const int* ids, int n, size_t* n_bytes) {
    return tokenizer_decode_with(t, ids, n, 0, n_bytes);
}

// ---- into the folder of a model ----

// the byte tokenizer as Hugging Face tokenizers has it: byte-level BPE without a merge
static inline json_t* tokenizer_bytes_json_(void) {
    short to_byte[N_BYTE_CHARS];
    const char* names[256];
    unsigned char spelled[N_BYTE_CHARS][5];
    json_t* vocab = json_object();
    pipeline_byte_characters_(to_byte);
    for (uint32_t code = 0; code < N_BYTE_CHARS; code++) {
        spelled[code][utf8_put(spelled[code], code)] = '\0';
        if (to_byte[code] >= 0) { names[to_byte[code]] = (const char*)spelled[code]; }
    }
    for (int i = 0; i < 256; i++) { json_object_set_new(vocab, names[i], json_integer(i)); }
    json_t* level = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 0,
                              "use_regex", 0);
    json_t* eot = json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", 256, "content", BYTES_EOT_TEXT, "single_word",
                            0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1);
    return json_pack("{s:s, s:n, s:n, s:[o], s:n, s:O, s:n, s:o, "
                     "s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:[]}}",
                     "version", "1.0", "truncation", "padding", "added_tokens", eot, "normalizer", "pre_tokenizer",
                     level, "post_processor", "decoder", level, "model", "type", "BPE", "dropout", "unk_token",
                     "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
                     "ignore_merges", 0, "vocab", vocab, "merges");
}

// tokenizer.json as it was read, or that of the byte tokenizer. 0: there is none (llm.c's is no file of Hugging Face's)
static inline int tokenizer_save(const char* folder, const Tokenizer* t, SavedFiles* files) {
    char path[PATH_BYTES];
    OutFile copy;
    path_join(path, folder, "tokenizer.json");
    if (!t->json && strcmp(t->kind, "bytes") != 0) { return 0; }
    if (!t->json) {
        saved_files_add(files, json_write(path, tokenizer_bytes_json_()));
        return 1;
    }
    outfile_open(&copy, path);
    outfile_write(&copy, t->json, t->n_json);
    saved_files_add(files, outfile_close(&copy));
    return 1;
}

// tokenizer_config.json of a model that came without one: transformers then takes tokenizer.json as it stands, where it
// would else build another tokenizer, usual for this kind of model, around its vocabulary; and it can fill up a batch,
// on the left, where generation wants it. No beginning of text: tokenizer(TEXT) gives the tokens of TEXT.
static inline void tokenizer_save_config(const char* folder, const Tokenizer* t, int max_T, SavedFiles* files) {
    char path[PATH_BYTES];
    int n_bytes;
    const char* bytes = tokenizer_bytes_of(t, t->eot, &n_bytes);
    json_t* eot = n_bytes > 0 ? json_stringn(bytes, (size_t)n_bytes) : json_string(BYTES_EOT_TEXT);
    json_t* config = json_pack("{s:s, s:b, s:O, s:[s, s], s:i, s:o, s:s}", "tokenizer_class", "PreTrainedTokenizerFast",
                               "clean_up_tokenization_spaces", 0, "eos_token", eot, "model_input_names", "input_ids",
                               "attention_mask", "model_max_length", max_T, "pad_token", eot, "padding_side", "left");
    saved_files_add(files, json_write(path_join(path, folder, "tokenizer_config.json"), config));
}
#endif  // LLMC_TOKENIZER_H
