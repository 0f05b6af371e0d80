/*
Conversations packed in rows (text/pack.h) as the subject of a trainer's test: several in a row are several rows.
    subject_check_conversations   the loss of each position of packed rows is that of one sample a row, to the last bit
*/
#ifndef LLMC_SUBJECT_CHAT_H
#define LLMC_SUBJECT_CHAT_H
#include "../core/rng.h"   // seeded_stream, xorshift_u32
#include "../text/pack.h"  // pack_rows, PACK_BEGINS
#include "subject.h"       // Subject

// random samples of 4 tokens or more, at most most_tokens, of which about half is learned and always the last
static inline void samples_make_(Conversations* c, int n, int most_tokens, int V) {
    uint64_t random = seeded_stream(5);
    memset(c, 0, sizeof *c);
    c->starts = (int64_t*)new_array((size_t)n + 1, sizeof(int64_t));
    c->tokens = (int*)new_array((size_t)(n * most_tokens), sizeof(int));
    c->n = n;
    for (int i = 0; i < n; i++) {
        const int length = 4 + (int)(xorshift_u32(&random) % (uint32_t)(most_tokens - 3));
        int* tokens = c->tokens + c->starts[i];
        c->starts[i + 1] = c->starts[i] + length;
        for (int k = 0; k < length; k++) {
            const int id = (int)(xorshift_u32(&random) % (uint32_t)V);
            tokens[k] = k == length - 1 || (k > 1 && xorshift_u32(&random) % 2) ? id : ~id;
        }
    }
}

// rows of conversations, and the loss of each position of them
typedef struct {
    int B, *inputs, *targets;
    float* losses;
} ChatRows;

static inline void chat_rows_open_(ChatRows* x, Subject* s, const Conversations* c, int shares) {
    const int T = s->file.T;
    TokenData d;
    DataLoader rows;
    pack_rows(&d, c, 0, c->n, "test", T, 0, 1, shares);
    dataloader_init(&rows, &d, T, ORDER_FILE, 0);
    x->B = (int)rows.n_rows;
    const size_t N = (size_t)x->B * (size_t)T;
    x->inputs = (int*)new_array(N, sizeof(int));
    x->targets = (int*)new_array(N, sizeof(int));
    x->losses = (float*)new_array(N, sizeof(float));
    dataloader_batch(&rows, 0, x->B, x->inputs, x->targets);
    s->segments->document_start = PACK_BEGINS;
    for (size_t first = 0; first < N; first += (size_t)T) {
        const float* losses = s->calls->losses(s, x->inputs + first, x->targets + first, 1);
        device_download(x->losses + first, losses, sizeof(float) * (size_t)T, &s->dev);
    }
    tokens_close(&d);
}

static inline void chat_rows_close_(ChatRows* x) { free(x->inputs), free(x->targets), free(x->losses); }

// the first row of `alone` that begins with the n positions from `at` on
static inline int chat_row_of_(const ChatRows* alone, int T, const ChatRows* x, size_t at, int n) {
    const size_t n_bytes = sizeof(int) * (size_t)n;
    for (int b = 0; b < alone->B; b++) {
        const size_t row = (size_t)b * (size_t)T;
        const int ends = n == T || alone->targets[row + (size_t)n] == PACK_BEGINS;
        if (ends && memcmp(alone->inputs + row, x->inputs + at, n_bytes) == 0 &&
            memcmp(alone->targets + row, x->targets + at, n_bytes) == 0) {
            return b;
        }
    }
    return -1;
}

static inline void subject_check_conversations(Test* t, const SubjectCalls* calls, const char* path, Way w) {
    enum { N_SAMPLES = 12 };
    Subject* s = subject_open(calls, path, w);
    Conversations c;
    ChatRows packed, alone;
    int n_found = 0;
    const int T = s->file.T;
    Segments segments;
    samples_make_(&c, N_SAMPLES, T / 2 > 4 ? T / 2 : 4, golden_int(&s->file, "vocab_size"));
    chat_rows_open_(&packed, s, &c, 1);
    chat_rows_open_(&alone, s, &c, 0);
    check(t, alone.B == N_SAMPLES && packed.B < N_SAMPLES, "%d and %d rows", alone.B, packed.B);
    segments_init(&segments, packed.B, T);
    segments.document_start = PACK_BEGINS;
    segments_find_marked(&segments, packed.inputs, packed.targets, packed.B, T);
    for (int i = 0; i < segments.n; i++) {
        const Segment x = segments.at[i];
        const int b = chat_row_of_(&alone, T, &packed, x.first, x.T);
        if (b < 0) { continue; }  // padding
        n_found++;
        golden_compare(t, "losses", packed.losses + x.first, alone.losses + (size_t)b * (size_t)T, (size_t)x.T,
                       subject_tolerances_(s).logits);
    }
    check(t, n_found == N_SAMPLES, "%d of %d samples stand in the rows", n_found, N_SAMPLES);
    chat_rows_close_(&packed), chat_rows_close_(&alone);
    free(c.starts), free(c.tokens), free(segments.at);
    subject_close(s);
}
#endif  // LLMC_SUBJECT_CHAT_H
