/*
Text from a model, token by token: prompt, window, sampling, streaming output. The model itself is one function:
    next_logits(model, tokens, n_cached, n)   logits (V) of the token that follows tokens[0 .. n). Keys and values (or
                                              the state) of the first n_cached tokens are still there from an earlier
                                              call
A text that outgrows the window of `room` positions goes on from its newer half, computed anew. Positions whose token is
the same as in the text before are not computed again: several samples share the work on their prompt.
Cost:   one forward pass of one position a token, prompt aside. Cached logits equal uncached ones to the last bit.
*/
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H
#include "../core/rng.h"        // xorshift_float
#include "../ops/sampler.h"     // sample_token
#include "../text/tokenizer.h"  // Tokenizer, TokenStream, tokenizer_encode_plain
#include "run.h"                // RunOptions

typedef const float* (*NextLogits)(void* model, const int* tokens, int n_cached, int n);

typedef struct {
    const RunOptions* o;         // max_new_tokens, samples
    Sampling sampling;           // how a token is chosen
    const Tokenizer* tokenizer;  // NULL: tokens are shown as numbers
    NextLogits next_logits;
    void* model;
    int V, room, eot;            // vocabulary, positions of the window, the token that ends a text
    int* tokens;                 // (room + 1)
    int n, n_cached;             // tokens so far; of them in the cache
    unsigned char* seen;         // (V) of each token: is it in the text, prompt included?
    Candidate* scratch;          // (V)
} Generator;

// how many positions a text of n_prompt tokens may fill before its older half is dropped
static inline int generator_room(const RunOptions* o, int n_prompt, int max_T) {
    int64_t wanted = (int64_t)n_prompt + o->max_new_tokens;
    return wanted < max_T ? (int)wanted : max_T;
}

static inline void generator_init(Generator* g, const RunOptions* o, const Tokenizer* tokenizer, int V, int room,
                                  int eot, NextLogits next_logits, void* model) {
    memset(g, 0, sizeof *g);
    g->o = o;
    g->sampling = run_sampling(o);
    g->tokenizer = tokenizer;
    g->next_logits = next_logits;
    g->model = model;
    g->V = V;
    g->room = room;
    g->eot = eot;
    g->tokens = (int*)malloc_check(sizeof(int) * ((size_t)room + 1), "tokens");
    g->seen = (unsigned char*)malloc_check((size_t)V, "tokens seen");
    g->scratch = (Candidate*)malloc_check(sizeof(Candidate) * (size_t)V, "candidates");
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

// the text that is certain with one more token, or at the end (token < 0)
static inline void generate_print_(TokenStream* stream, int token, FILE* out) {
    size_t n_bytes;
    const char* text = token < 0 ? token_stream_end(stream, &n_bytes) : token_stream_put(stream, token, &n_bytes);
    if (out) { text_print_safe(text, n_bytes, out); }
}

// continue a prompt until --max-new-tokens or end of text; what is known of the text is written at once
static inline void generate(Generator* g, uint64_t* random, const int* prompt, int n_prompt, FILE* out) {
    TokenStream stream;
    if (g->tokenizer) { token_stream_init(&stream, g->tokenizer, 1); }
    // a text goes on, none begins
    for (int i = 0; g->tokenizer && i < n_prompt; i++) { generate_print_(&stream, prompt[i], NULL); }
    generator_start_(g, prompt, n_prompt);
    for (int i = 0; i < g->o->max_new_tokens; i++) {
        int token = generator_next_(g, random);
        if (token == g->eot) { break; }
        if (g->tokenizer) { generate_print_(&stream, token, out); } else { fprintf(out, "%d ", token); }
        fflush(out);
    }
    if (g->tokenizer) {
        generate_print_(&stream, -1, out);
        token_stream_free(&stream);
    }
    fputc('\n', out);
}

// a sample while training: from end of text on, to the terminal and to samples.txt
static inline void generate_sample(Generator* g, RunState* s) {
    char* text;
    size_t n_bytes;
    FILE* memory = open_memstream(&text, &n_bytes);
    if (!memory) { fail_run("sample: no memory"); }
    g->n_cached = 0;  // the parameters have changed since
    generate(g, &s->sampler, &g->eot, 1, memory);
    fclose(memory);
    run_show_sample(g->o, s->step, text);
    free(text);
}

// the tokens of --generate TEXT, behind end of text; TEXT itself comes from standard input for "-"
typedef struct {
    char* text;
    size_t n_bytes;
    int* tokens;
    int n;
} Prompt;

static inline Prompt prompt_read(const RunOptions* o, const Tokenizer* tokenizer) {
    Prompt p;
    int* encoded;
    p.text = run_prompt(o, &p.n_bytes);
    p.n = 1 + tokenizer_encode_plain(tokenizer, p.text, p.n_bytes, &encoded);
    p.tokens = (int*)malloc_check(sizeof(int) * (size_t)p.n, "prompt");
    p.tokens[0] = tokenizer_need_eot(tokenizer);
    memcpy(p.tokens + 1, encoded, sizeof(int) * (size_t)(p.n - 1));
    free(encoded);
    return p;
}

static inline void prompt_free(Prompt* p) {
    free(p->text);
    free(p->tokens);
}

// --samples texts, each with its prompt in front; several are numbered
static inline void generate_texts(Generator* g, uint64_t* random, const Prompt* p) {
    for (int i = 0; i < g->o->samples; i++) {
        if (g->o->samples > 1) { printf("--- sample %d of %d\n", i + 1, g->o->samples); }
        fwrite(p->text, 1, p->n_bytes, stdout);
        generate(g, random, p->tokens, p->n, stdout);
    }
}
#endif  // LLMC_GENERATE_H
