/*
Text from a model, token by token: prompts, window, sampling, streaming output. The model itself is one function:
    next_logits(model, tokens, n_cached, n)   logits (V) of the token that follows tokens[0 .. n). Keys and values (or
                                              the state) of the first n_cached tokens are still there from an earlier
                                              call
A text ends at end of text, before a text of --stop, or after --max-new-tokens. One that outgrows the window of `room`
positions goes on from its newer half, computed anew. Positions whose token is the same as in the text before are not
computed again: several samples share the work on their prompt.
Cost:   one forward pass of one position a token, prompt aside. Cached logits equal uncached ones to the last bit.
*/
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H
#include "../core/rng.h"        // xorshift_float
#include "../ops/sampler.h"     // sample_token
#include "../text/stop.h"       // StopTexts, StopStream
#include "../text/tokenizer.h"  // Tokenizer, TokenStream
#include "prompts.h"            // Prompt, prompt_make; RunOptions, run_sampling

typedef const float* (*NextLogits)(void* model, const int* tokens, int n_cached, int n);

typedef struct {
    const RunOptions* o;         // max_new_tokens, samples
    const Tokenizer* tokenizer;  // NULL: tokens are shown as numbers
    const StopTexts* stop;
    NextLogits next_logits;
    void* model;
    int V, room, eot;            // vocabulary, positions of the window, the token that ends a text
    Sampling sampling;           // how a token is chosen
    int* tokens;                 // (room + 1)
    int n, n_cached;             // tokens so far; of them in the cache
    unsigned char* seen;         // (V) of each token: is it in the text, prompt included?
    Candidate* scratch;          // (2, V)
} Generator;

// how many positions a text of n_prompt tokens may fill before its older half is dropped
static inline int generator_room(const RunOptions* o, int n_prompt, int max_T) {
    int64_t wanted = (int64_t)n_prompt + o->max_new_tokens;
    return wanted < max_T ? (int)wanted : max_T;
}

// the caller has filled in what stands above `sampling`, and the rest is zero
static inline void generator_init(Generator* g) {
    g->sampling = run_sampling(g->o);
    g->tokens = (int*)malloc_check(sizeof(int) * ((size_t)g->room + 1), "tokens");
    g->seen = (unsigned char*)malloc_check((size_t)g->V, "tokens seen");
    g->scratch = (Candidate*)malloc_check(sizeof(Candidate) * 2 * (size_t)g->V, "candidates");
}

static inline void generator_free(Generator* g) {
    free(g->tokens);
    free(g->seen);
    free(g->scratch);
}

// the end of the prompt that fits; what it shares with the text before stays in the cache
static inline void generator_start_(Generator* g, const int* prompt, int n_prompt) {
    int n = n_prompt < g->room ? n_prompt : g->room, shared = 0;
    memset(g->seen, 0, (size_t)g->V);
    for (int i = 0; i < n_prompt; i++) { g->seen[prompt[i]] = 1; }
    prompt += n_prompt - n;
    while (shared < n - 1 && shared < g->n_cached && g->tokens[shared] == prompt[shared]) { shared++; }
    memcpy(g->tokens, prompt, sizeof(int) * (size_t)n);
    g->n = n;
    g->n_cached = shared;
}

static inline void generator_drop_older_half_(Generator* g) {
    int keep = (g->room + 1) / 2;
    memmove(g->tokens, g->tokens + g->n - keep, sizeof(int) * (size_t)keep);
    g->n = keep;
    g->n_cached = 0;
}

// the next token; it joins the text
static inline int generator_next_(Generator* g, uint64_t* random) {
    if (g->n > g->room) { generator_drop_older_half_(g); }
    const float* logits = g->next_logits(g->model, g->tokens, g->n_cached, g->n);
    int token = sample_token(logits, g->V, &g->sampling, g->seen, xorshift_float(random), g->scratch);
    g->seen[token] = 1;
    g->n_cached = g->n;
    g->tokens[g->n++] = token;
    return token;
}

// ---- one text ----

// a token that is not shown and has the name of a stop text: <|im_end|>
static inline int generator_stops_at_(const Generator* g, int token) {
    const Tokenizer* t = g->tokenizer;
    if (!t || !t->pipeline || token >= t->n_tokens || !(t->pipeline->flags[token] & TOKEN_SPECIAL)) { return 0; }
    int n_bytes;
    const char* name = tokenizer_bytes_of(t, token, &n_bytes);
    return stop_texts_have(g->stop, name, (size_t)n_bytes);
}

// what is certain of the text with one more token, or at the end (token < 0)
static inline void generate_print_(TokenStream* stream, StopStream* stop, int token, FILE* out) {
    size_t n_bytes;
    const char* text = token < 0 ? token_stream_end(stream, &n_bytes) : token_stream_put(stream, token, &n_bytes);
    text = stop_stream_put(stop, text, n_bytes, &n_bytes);
    text_print_safe(text, n_bytes, out);
    if (token >= 0) { return; }
    text = stop_stream_end(stop, &n_bytes);
    text_print_safe(text, n_bytes, out);
}

// the prompt is part of the text to the tokenizer, not to --stop
static inline void generate_begin_(Generator* g, TokenStream* stream, StopStream* stop, const Prompt* p) {
    size_t n_bytes;
    generator_start_(g, p->tokens, p->n);
    if (!g->tokenizer) { return; }
    stop_stream_init(stop, g->stop);
    token_stream_init(stream, g->tokenizer, 1);
    for (int i = 0; i < p->n; i++) { token_stream_put(stream, p->tokens[i], &n_bytes); }
    token_stream_after_prompt(stream);
}

// continue a prompt to the end of the text; what is known of it is written at once
static inline void generate(Generator* g, uint64_t* random, const Prompt* p, FILE* out) {
    TokenStream stream;
    StopStream stop = {NULL, {NULL, 0, 0}, 0, 0};
    generate_begin_(g, &stream, &stop, p);
    for (int i = 0; i < g->o->max_new_tokens && !stop.found; i++) {
        int token = generator_next_(g, random);
        if (token == g->eot || generator_stops_at_(g, token)) { break; }
        if (g->tokenizer) { generate_print_(&stream, &stop, token, out); } else { fprintf(out, "%d ", token); }
        fflush(out);
    }
    if (g->tokenizer) {
        generate_print_(&stream, &stop, -1, out);
        token_stream_free(&stream);
        stop_stream_free(&stop);
    }
    fputc('\n', out);
}

// ---- --generate ----

static inline Prompt generate_prompt(const RunOptions* o, const Tokenizer* tokenizer) {
    size_t n_bytes;
    char* text = run_prompt(o, &n_bytes);
    return prompt_make(o, tokenizer, text, n_bytes);
}

// --samples texts, each with its prompt in front; several are numbered
static inline void generate_texts(Generator* g, uint64_t* random, const Prompt* p) {
    for (int i = 0; i < g->o->samples; i++) {
        if (g->o->samples > 1) { printf("--- sample %d of %d\n", i + 1, g->o->samples); }
        fwrite(p->text, 1, p->n_bytes, stdout);
        generate(g, random, p, stdout);
    }
}
#endif  // LLMC_GENERATE_H
