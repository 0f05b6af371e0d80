/*
Several texts of a model side by side: while one text alone reads every weight for each of its tokens, these share what
is read. Each text has a row of the cache (generate.h). Its prompt is computed alone; then a pass has the next position
of every text, and a row whose text has ended takes the next one at once.
    side_by_side     texts first .. end-1, each asked for by its number (TextJob) and handed on in order: all of one,
                     piece by piece, before any of the next
    generate_texts   --generate: --samples texts of one prompt
What a text says does not depend on those beside it, nor on how many there are: its random numbers are its own, no sum
of the model has terms of two rows, or an order that follows from their number (gemm.h, grouped_matmul.h, few_rows.h),
and attention is computed text by text. A prompt that begins as a text in another row does takes those positions from
there.
Cost:   a pass for every token of the longest text of each row; the weights are read once a pass. Texts that are done
        before their turn wait in memory.
*/
#ifndef LLMC_SIDE_BY_SIDE_H
#define LLMC_SIDE_BY_SIDE_H
#include "generate.h"  // Generator, MadeText, text_begin, text_add, text_end

typedef struct {
    void* context;
    void (*ask)(void* context, int64_t i, TextAsked* asked);      // fills in prompt, most, stop and *random
    void (*take)(void* context, const char* text, size_t n_bytes);  // of the text whose turn it is
    void (*ended)(void* context, int64_t i, TextEnd end);         // that text; i ascends
} TextJob;

// what a text that is not yet due has said
typedef struct {
    ByteBuffer text;
    TextEnd end;
} WaitingText;

typedef struct SideBySide SideBySide;

typedef struct {
    SideBySide* all;
    int64_t i;        // number of the text, -1: there is none
    uint64_t random;
} SideRow;

struct SideBySide {
    Generator* g;
    const TextJob* job;
    int64_t due, begun, end;  // the text whose turn it is; how many have begun; all
    WaitingText* waiting;     // of texts due .. begun-1,
    int64_t n_room;           // with room for so many
    SideRow* rows;            // (n_rows)
    CachedText* pass;         // (n_rows)
};

// ---- texts are handed on in order ----

static inline void side_take_(void* row, const char* text, size_t n_bytes) {
    const SideRow* x = (const SideRow*)row;
    SideBySide* s = x->all;
    if (x->i == s->due) { s->job->take(s->job->context, text, n_bytes); }
    else { buffer_append(&s->waiting[x->i - s->due].text, text, n_bytes); }
}

// room for one text more
static inline void side_expect_(SideBySide* s) {
    const WaitingText none = {{NULL, 0, 0}, TEXT_GOES_ON};
    const int64_t n = s->begun - s->due;
    if (n == s->n_room) {
        s->n_room = n > 0 ? 2 * n : 16;
        s->waiting = (WaitingText*)realloc_check(s->waiting, sizeof none * (size_t)s->n_room, "texts");
    }
    s->waiting[n] = none;
    s->begun++;
}

// the text that is due has ended: it goes, as do those behind it that have ended too
static inline void side_hand_on_(SideBySide* s) {
    const TextJob* job = s->job;
    while (s->due < s->begun && s->waiting[0].end != TEXT_GOES_ON) {
        job->ended(job->context, s->due, s->waiting[0].end);
        buffer_free(&s->waiting[0].text);
        s->due++;
        memmove(s->waiting, s->waiting + 1, sizeof *s->waiting * (size_t)(s->begun - s->due));
        if (s->due == s->begun) { return; }
        ByteBuffer* text = &s->waiting[0].text;
        if (text->n > 0) { job->take(job->context, (const char*)text->bytes, text->n); }
        text->n = 0;
    }
}

// ---- a row and its texts ----

// the next text begins in row r, with whatever the cache has of its prompt already
static inline void side_begin_(SideBySide* s, int r) {
    Generator* g = s->g;
    SideRow* row = &s->rows[r];
    TextAsked asked = {NULL, 0, NULL, &row->random, side_take_, row};
    int from = r;
    row->i = s->begun;
    side_expect_(s);
    s->job->ask(s->job->context, row->i, &asked);
    int n_shared = generator_shared_(g, &g->rows[r], asked.prompt);
    for (int other = 0; other < g->n_rows; other++) {
        const int n_other = generator_shared_(g, &g->rows[other], asked.prompt);
        if (n_other > n_shared) { n_shared = n_other, from = other; }
    }
    if (from != r) { g->share_text(g->model, r, from, n_shared); }
    text_begin(g, &g->rows[r], &asked, n_shared);
}

// n rows, those of the pass, are one token longer
static inline void side_pass_(SideBySide* s, int n) {
    const float* logits = generator_logits_(s->g, s->pass, n);
    for (int k = 0; k < n; k++) {
        const int r = s->pass[k].row;
        MadeText* x = &s->g->rows[r];
        SideRow* row = &s->rows[r];
        text_add(s->g, x, logits + (size_t)k * (size_t)s->g->V);
        if (x->end == TEXT_GOES_ON) { continue; }
        text_end(s->g, x);
        s->waiting[row->i - s->due].end = x->end;
        row->i = -1;
        side_hand_on_(s);
    }
}

// Row r is to have a text of which one position is not in the cache; whatever is missing before is computed now, alone.
// 0: there is no text for it
static inline int side_prepare_(SideBySide* s, int r) {
    MadeText* x = &s->g->rows[r];
    for (;;) {
        if (s->rows[r].i < 0) {
            if (s->begun == s->end) { return 0; }
            side_begin_(s, r);
        }
        generator_fit(s->g, x);
        const CachedText text = generator_text_(x, r);
        if (x->n - x->n_cached == 1) { return 1; }
        s->pass[0] = text;
        side_pass_(s, 1);
    }
}

static inline void side_by_side(Generator* g, int64_t first, int64_t end, const TextJob* job) {
    const size_t n_rows = (size_t)g->n_rows;
    SideBySide s = {g, job, first, first, end, NULL, 0, NULL, NULL};
    int n;
    s.rows = (SideRow*)malloc_check(sizeof(SideRow) * n_rows, "texts");
    s.pass = (CachedText*)malloc_check(sizeof(CachedText) * n_rows, "texts");
    for (int r = 0; r < g->n_rows; r++) {
        const SideRow none = {&s, -1, 0};
        s.rows[r] = none;
    }
    do {
        n = 0;
        for (int r = 0; r < g->n_rows; r++) { side_prepare_(&s, r); }
        for (int r = 0; r < g->n_rows; r++) {
            const MadeText* x = &g->rows[r];
            const CachedText text = generator_text_(x, r);
            if (s.rows[r].i >= 0) { s.pass[n++] = text; }
        }
        if (n > 0) { side_pass_(&s, n); }
    } while (n > 0);
    free(s.waiting);
    free(s.rows);
    free(s.pass);
}

// ---- --generate ----

static inline Prompt generate_prompt(const RunOptions* o, const Tokenizer* tokenizer) {
    size_t n_bytes;
    char* text = run_prompt(o, &n_bytes);
    return prompt_make(o, tokenizer, text, n_bytes);
}

typedef struct {
    const Generator* g;
    const Prompt* p;
    uint64_t random;  // of the first text
    SafeText safe;
} Samples;

// several texts are numbered; each has its prompt in front
static inline void samples_title_(const Samples* x, int64_t i) {
    const int n = x->g->o->samples;
    if (i == n) { return; }
    if (n > 1) { printf("--- sample %d of %d\n", (int)i + 1, n); }
    fwrite(x->p->text, 1, x->p->n_bytes, stdout);
}

static inline void samples_ask_(void* samples, int64_t i, TextAsked* asked) {
    const Samples* x = (const Samples*)samples;
    asked->prompt = x->p;
    asked->most = x->g->o->max_new_tokens;
    asked->stop = x->g->stop;
    *asked->random = i == 0 ? x->random : splitmix64(x->random, (uint64_t)i) | 1;
}

static inline void samples_take_(void* samples, const char* text, size_t n_bytes) {
    generate_take_safe_(&((Samples*)samples)->safe, text, n_bytes);
}

static inline void samples_ended_(void* samples, int64_t i, TextEnd end) {
    Samples* x = (Samples*)samples;
    (void)end;
    text_print_safe_end(&x->safe);
    fputc('\n', stdout);
    samples_title_(x, i + 1);
}

// --samples texts of one prompt. What the i-th says depends on `random` and i alone
static inline void generate_texts(Generator* g, uint64_t random, const Prompt* p) {
    Samples x = {g, p, random, {stdout, 0}};
    const TextJob job = {&x, samples_ask_, samples_take_, samples_ended_};
    samples_title_(&x, 0);
    side_by_side(g, 0, g->o->samples, &job);
}
#endif  // LLMC_SIDE_BY_SIDE_H
