/*
Text from a model, token by token: prompts, window, sampling, streaming output. The model itself is one function:
    next_logits(model, tokens, n_cached, n)   logits (V) of the token that follows tokens[0 .. n). Keys and values (or
                                              the state) of the first n_cached tokens are still there from an earlier
                                              call
or, where several texts are made side by side (side_by_side.h), two:
    next_of_each(model, texts, n)             logits (n, V) of the token that follows each of n texts, each with a row
                                              of the cache to itself: one text, or several with one new position each
    share_text(model, to, from, n)            the first n positions of row `from` are those of row `to`, too
    generate_to    a text from a prompt on, piece by piece to a function
    generate       ... to a file, with a line end
    text_begin, text_add, text_end            what a text goes through on its way, a token at a time
A text ends at end of text, before a text of --stop, or after --max-new-tokens. One that outgrows the window of `room`
positions goes on from its newer half, computed anew. Positions whose token is the same as in the text before are not
computed again: several samples share the work on their prompt. A prompt goes through the model in pieces, so that a
pass needs no more memory for a longer one.
Cost:   one forward pass of one position a token, and of `piece` positions of the prompt. Cached logits equal uncached
        ones to the last bit.
*/
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H
#include "../core/rng.h"        // xorshift_float
#include "../ops/cached_text.h" // CachedText
#include "../ops/sampler.h"     // sample_token
#include "../text/stop.h"       // StopTexts, StopStream
#include "../text/tokenizer.h"  // Tokenizer, TokenStream
#include "prompts.h"            // Prompt; RunOptions, run_sampling
#include <signal.h>

typedef const float* (*NextLogits)(void* model, const int* tokens, int n_cached, int n);
typedef const float* (*NextOfEach)(void* model, const CachedText* texts, int n);
typedef void (*ShareText)(void* model, int to, int from, int n);

// where a text goes, as far as it is certain
typedef void (*TakeText)(void* to, const char* text, size_t n_bytes);

typedef struct {
    const Prompt* prompt;
    int most;               // tokens
    const StopTexts* stop;
    uint64_t* random;       // the state that its tokens are drawn with
    TakeText take;
    void* to;
} TextAsked;

// why a text ended: by itself (end of text, --stop), for it had no more tokens to go, or somebody had enough
typedef enum { TEXT_GOES_ON, TEXT_ENDED, TEXT_FULL, TEXT_INTERRUPTED } TextEnd;

// a text that is being made, or the one before it, whose positions are still in the cache
typedef struct {
    TextAsked asked;
    int* tokens;            // (room + 1)
    int n, n_cached;        // tokens so far; of them in the cache
    int left;               // tokens that may still come
    unsigned char* seen;    // (V) of each token: is it in the text, prompt included?
    TextImages images;      // in it
    TokenStream stream;
    StopStream stop;
    TextEnd end;
} MadeText;

typedef struct {
    const RunOptions* o;         // max_new_tokens, samples
    const Tokenizer* tokenizer;  // NULL: tokens are shown as numbers
    const StopTexts* stop;
    NextLogits next_logits;
    NextOfEach next_of_each;     // or NULL, then there is one row
    ShareText share_text;
    void* model;
    int V, room, eot;            // vocabulary, positions of the window, the token that ends a text
    int piece;                   // positions of a text that a pass has at most
    int n_rows;                  // texts that are made side by side
    int has_states;              // the cache has what all positions of a text leave behind, not each of them: another
                                 // text begins with all of it or with nothing
    const volatile sig_atomic_t* interrupted;  // or NULL; not 0: the text ends here
    Sampling sampling;           // how a token is chosen
    MadeText* rows;              // (n_rows)
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
    g->rows = (MadeText*)calloc((size_t)g->n_rows, sizeof(MadeText));
    if (!g->rows) { fail_run("texts: no memory"); }
    for (int i = 0; i < g->n_rows; i++) {
        g->rows[i].tokens = (int*)malloc_check(sizeof(int) * ((size_t)g->room + 1), "tokens");
        g->rows[i].seen = (unsigned char*)malloc_check((size_t)g->V, "tokens seen");
    }
    g->scratch = (Candidate*)malloc_check(sizeof(Candidate) * 2 * (size_t)g->V, "candidates");
}

static inline void generator_free(Generator* g) {
    for (int i = 0; i < g->n_rows; i++) {
        free(g->rows[i].tokens);
        free(g->rows[i].seen);
        text_images_free(&g->rows[i].images);
    }
    free(g->rows);
    free(g->scratch);
}

// the parameters have changed: what the cache has is of no use
static inline void generator_forget(Generator* g) {
    for (int i = 0; i < g->n_rows; i++) { g->rows[i].n_cached = 0; }
}

// the end of the prompt that fits, and how many of its tokens it is
static inline const int* generator_prompt_(const Generator* g, const Prompt* p, int* n) {
    *n = p->n < g->room ? p->n : g->room;
    return p->tokens + (p->n - *n);
}

// how many positions of the cache a text has in common with a prompt, the last of whose tokens is always computed
static inline int generator_shared_(const Generator* g, const MadeText* x, const Prompt* p) {
    int shared = 0, n;
    const int* tokens = generator_prompt_(g, p, &n);
    n = text_images_alike(&x->images, &p->images, n);
    while (shared < n - 1 && shared < x->n_cached && x->tokens[shared] == tokens[shared]) { shared++; }
    return g->has_states && shared < x->n_cached ? 0 : shared;
}

static inline void generator_drop_older_half_(Generator* g, MadeText* x) {
    const int keep = (g->room + 1) / 2;
    assert(x->images.n == 0);  // of a conversation, whose window does not move on
    memmove(x->tokens, x->tokens + x->n - keep, sizeof(int) * (size_t)keep);
    x->n = keep;
    x->n_cached = 0;
}

// the window has room for the next position
static inline void generator_fit(Generator* g, MadeText* x) {
    if (x->n > g->room) { generator_drop_older_half_(g, x); }
}

// text x in row r of the cache, as a pass sees it
static inline CachedText generator_text_(const MadeText* x, int r) {
    const CachedText text = {x->tokens, r, x->n_cached, x->n, x->images.n > 0 ? &x->images : NULL};
    return text;
}

static inline const float* generator_pass_(const Generator* g, const CachedText* texts, int n) {
    if (g->next_of_each) { return g->next_of_each(g->model, texts, n); }
    return g->next_logits(g->model, texts->tokens, texts->n_cached, texts->n);
}

// Of the tokens that follow n texts: one whose new positions come piece by piece, or several with one each. Of logits
// behind a piece nobody asks but behind the last
static inline const float* generator_logits_(const Generator* g, const CachedText* texts, int n) {
    CachedText piece = *texts;
    for (; n == 1 && texts->n - piece.n_cached > g->piece; piece.n_cached = piece.n) {
        piece.n = piece.n_cached + g->piece;
        generator_pass_(g, &piece, 1);
    }
    piece.n = texts->n;
    return generator_pass_(g, n == 1 ? &piece : texts, n);
}

// the token that follows; it joins the text
static inline int generator_choose_(Generator* g, MadeText* x, const float* logits) {
    const float random = xorshift_float(x->asked.random);
    const int token = sample_token(logits, g->V, &g->sampling, x->seen, random, g->scratch);
    x->seen[token] = 1;
    x->n_cached = x->n;
    x->tokens[x->n++] = token;
    return token;
}

// ---- one text ----

// a token that is not shown and has the name of a stop text: <|im_end|>
static inline int generator_stops_at_(const Generator* g, const StopTexts* stop, int token) {
    const Tokenizer* t = g->tokenizer;
    if (!t || !t->pipeline || token >= t->n_tokens || !(t->pipeline->flags[token] & TOKEN_SPECIAL)) { return 0; }
    int n_bytes;
    const char* name = tokenizer_bytes_of(t, token, &n_bytes);
    return stop_texts_have(stop, name, (size_t)n_bytes);
}

// what is certain of the text with one more token, or at the end (token < 0)
static inline void text_put_(MadeText* x, int token) {
    const TextAsked* to = &x->asked;
    size_t n_bytes;
    const char* text =
        token < 0 ? token_stream_end(&x->stream, &n_bytes) : token_stream_put(&x->stream, token, &n_bytes);
    text = stop_stream_put(&x->stop, text, n_bytes, &n_bytes);
    to->take(to->to, text, n_bytes);
    if (token >= 0) { return; }
    text = stop_stream_end(&x->stop, &n_bytes);
    to->take(to->to, text, n_bytes);
}

// without a tokenizer tokens are numbers
static inline void text_put_number_(const MadeText* x, int token) {
    char text[16];
    x->asked.take(x->asked.to, text, (size_t)snprintf(text, sizeof text, "%d ", token));
}

// In row x, whose cache keeps the first n_shared positions. The prompt is part of the text to the tokenizer, not to
// --stop
static inline void text_begin(Generator* g, MadeText* x, const TextAsked* asked, int n_shared) {
    const Prompt* p = asked->prompt;
    const StopStream none = {NULL, {NULL, 0, 0}, 0, 0};
    size_t n_bytes;
    const int* tokens = generator_prompt_(g, p, &x->n);
    memcpy(x->tokens, tokens, sizeof(int) * (size_t)x->n);
    x->n_cached = n_shared;
    text_images_copy(&x->images, &p->images);
    x->asked = *asked;
    x->left = asked->most;
    x->end = asked->most > 0 ? TEXT_GOES_ON : TEXT_FULL;
    x->stop = none;
    memset(x->seen, 0, (size_t)g->V);
    for (int i = 0; i < p->n; i++) { x->seen[p->tokens[i]] = 1; }
    if (!g->tokenizer) { return; }
    stop_stream_init(&x->stop, asked->stop);
    token_stream_init(&x->stream, g->tokenizer, 1);
    for (int i = 0; i < p->n; i++) { token_stream_put(&x->stream, p->tokens[i], &n_bytes); }
    token_stream_after_prompt(&x->stream);
}

// one more token; x->end says whether the text goes on
static inline void text_add(Generator* g, MadeText* x, const float* logits) {
    const int token = generator_choose_(g, x, logits);
    const int is_last = token == g->eot || generator_stops_at_(g, x->asked.stop, token);
    if (!is_last && g->tokenizer) { text_put_(x, token); }
    else if (!is_last) { text_put_number_(x, token); }
    x->left--;
    x->end = is_last || x->stop.found ? TEXT_ENDED : x->left > 0 ? TEXT_GOES_ON : TEXT_FULL;
}

// what is left of the text goes where it belongs
static inline void text_end(Generator* g, MadeText* x) {
    if (!g->tokenizer) { return; }
    text_put_(x, -1);
    token_stream_free(&x->stream);
    stop_stream_free(&x->stop);
}

// in the first row
static inline TextEnd generate_to(Generator* g, const TextAsked* asked) {
    MadeText* x = g->rows;
    text_begin(g, x, asked, generator_shared_(g, x, asked->prompt));
    while (x->end == TEXT_GOES_ON) {
        if (g->interrupted && *g->interrupted) {
            x->end = TEXT_INTERRUPTED;
            break;
        }
        generator_fit(g, x);
        const CachedText text = generator_text_(x, 0);
        text_add(g, x, generator_logits_(g, &text, 1));
    }
    text_end(g, x);
    return x->end;
}

static inline void generate_take_safe_(void* safe, const char* text, size_t n_bytes) {
    SafeText* to = (SafeText*)safe;
    text_print_safe_piece(to, text, n_bytes);
    fflush(to->out);
}

// continues a prompt to the end of the text; what is known of it is written at once
static inline void generate(Generator* g, uint64_t* random, const Prompt* p, FILE* out) {
    SafeText safe = {out, 0};
    const TextAsked asked = {p, g->o->max_new_tokens, g->stop, random, generate_take_safe_, &safe};
    generate_to(g, &asked);
    text_print_safe_end(&safe);
    fputc('\n', out);
}
#endif  // LLMC_GENERATE_H
