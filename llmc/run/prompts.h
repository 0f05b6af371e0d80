/*
Prompts: what a text is continued from, as tokens of the model.
    prompt_make      the tokens of a text, with end of text in front of them unless --prompt-eot 0
    prompts_to_json  which they were, for settings.json
    prompts_read     those of --sample-prompts FILE: each line is one, with \n, \t and \\ as escape.h has them; empty
                     lines are passed over, blanks at the end of a line belong to the prompt
Errors: fail_input for a file that is none or larger than 1 MiB, a line that is no UTF-8 or has another backslash, and a
prompt that is longer than the model's positions.
*/
#ifndef LLMC_PROMPTS_H
#define LLMC_PROMPTS_H
#include "../core/outfile.h"    // hex_text
#include "../ops/cached_text.h" // TextImages
#include "../text/escape.h"     // text_unescape
#include "../text/tokenizer.h"  // Tokenizer, tokenizer_encode_plain, tokenizer_need_eot
#include "run_options.h"        // RunOptions, options_fail
#include <xxhash.h>

typedef struct {
    char* text;
    size_t n_bytes;
    int* tokens;  // (n)
    int n;
    TextImages images;
} Prompt;

// takes the text, which is on the heap
static inline Prompt prompt_make(const RunOptions* o, const Tokenizer* tokenizer, char* text, size_t n_bytes) {
    Prompt p = {text, n_bytes, NULL, 0, {NULL, 0}};
    int *encoded, n = tokenizer_encode_plain(tokenizer, text, n_bytes, &encoded);
    p.tokens = (int*)malloc_check(sizeof(int) * ((size_t)n + 1), "prompt");
    if (o->prompt_eot) { p.tokens[p.n++] = tokenizer_need_eot(tokenizer); }
    memcpy(p.tokens + p.n, encoded, sizeof(int) * (size_t)n);
    p.n += n;
    free(encoded);
    if (p.n == 0) {
        fail_input("a prompt without a token leaves nothing to go on from: give a text, or --prompt-eot 1");
    }
    return p;
}

static inline void prompt_free(Prompt* p) {
    free(p->text);
    free(p->tokens);
    text_images_free(&p->images);
}

// ---- --sample-prompts ----

typedef struct {
    Prompt* list;
    int n;           // 0: samples begin with end of text
    int longest;     // tokens of the longest, 1 where there is none
    uint64_t xxh3;   // of the file
} Prompts;

enum { PROMPTS_MAX_BYTES = 1 << 20 };

static inline void prompts_add_(Prompts* p, const RunOptions* o, const Tokenizer* tokenizer, int max_T,
                                const char* line, size_t n_bytes, int number) {
    ByteBuffer text = {NULL, 0, 0};
    ErrorText error;
    if (utf8_valid_prefix((const unsigned char*)line, n_bytes) < n_bytes) {
        fail_input("%s:%d: expected UTF-8", o->sample_prompts, number);
    }
    if (!text_unescape(&text, line, n_bytes, &error)) {
        fail_input("%s:%d: %s", o->sample_prompts, number, error.text);
    }
    const Prompt prompt = prompt_make(o, tokenizer, (char*)text.bytes, text.n);
    if (prompt.n > max_T) {
        fail_input("%s:%d: expected a prompt of at most the model's %d positions, found %d tokens%s", o->sample_prompts,
                   number, max_T, prompt.n, o->prompt_eot ? " with end of text in front" : "");
    }
    p->list = (Prompt*)realloc_check(p->list, sizeof(Prompt) * ((size_t)p->n + 1), "prompts");
    p->list[p->n++] = prompt;
    p->longest = prompt.n > p->longest ? prompt.n : p->longest;
}

static inline void prompts_read(Prompts* p, const RunOptions* o, const Tokenizer* tokenizer, int max_T) {
    MappedFile file;
    ErrorText error;
    if (!file_map_or_not(&file, o->sample_prompts, &error)) {
        options_fail("sample-prompts", "%s: %s", o->sample_prompts, error.text);
    }
    if (file.n_bytes > PROMPTS_MAX_BYTES) {
        options_fail("sample-prompts", "%s: expected at most 1 MiB of prompts, found %s", o->sample_prompts,
                     format_bytes((double)file.n_bytes).s);
    }
    const char *at = (const char*)file.bytes, *end = at + file.n_bytes;
    for (int number = 1; at < end; number++) {
        const char* newline = (const char*)memchr(at, '\n', (size_t)(end - at));
        const size_t n_line = (size_t)((newline ? newline : end) - at);
        const size_t n_bytes = n_line - (n_line > 0 && at[n_line - 1] == '\r');
        if (n_bytes > 0) { prompts_add_(p, o, tokenizer, max_T, at, n_bytes, number); }
        at = newline ? newline + 1 : end;
    }
    p->xxh3 = XXH3_64bits(file.bytes, file.n_bytes);
    file_unmap(&file);
    if (p->n == 0) {
        options_fail("sample-prompts", "%s: expected a prompt on each line, found none", o->sample_prompts);
    }
}

// for settings.json; null: none
static inline json_t* prompts_to_json(const Prompts* p, const char* path) {
    if (p->n == 0) { return json_null(); }
    return json_pack("{s:s, s:i, s:s}", "path", path, "prompts", p->n, "xxh3", hex_text(p->xxh3).s);
}

static inline void prompts_free(Prompts* p) {
    for (int i = 0; i < p->n; i++) { prompt_free(&p->list[i]); }
    free(p->list);
}
#endif  // LLMC_PROMPTS_H
