/*
Promises of llmc/ops/documents.h and mtp_tokens.h: the segments of a batch are the pieces of its documents, and
embedding and attention over segments give the bits of the pieces as sequences of their own, forward and backward; so
does the trainer's whole model. The token after the next stays in its document.
*/
#define TESTING
#include "train_gpt2.c"
#include "llmc/ops/documents.h"
#include "llmc/ops/mtp_tokens.h"
#include "llmc/test/test.h"

enum { EOT = 7, MARK = -2 };  // a token; in place of a target

// ---- segments ----

// position i begins a segment: said once more, from the other side
static int begins(const int* inputs, int i, int T) { return inputs[i] == EOT || i % T == 0; }

static void check_segments(Test* t, const int* inputs, int B, int T) {
    Segment* s = (Segment*)new_array((size_t)B * T, sizeof(Segment));
    int n = documents_segments(s, inputs, B, T, EOT), at = 0;
    for (int k = 0; k < n; k++) {
        check(t, s[k].first == (size_t)at && s[k].rows == 1 && s[k].T >= 1,
              "segment %d: {%zu, %d, %d}, expected to begin at %d", k, s[k].first, s[k].rows, s[k].T, at);
        for (int i = 0; i < s[k].T && at < B * T; i++, at++) {
            check(t, begins(inputs, at, T) == (i == 0), "(%d, %d): position %d is number %d of segment %d", B, T, at, i,
                  k);
        }
    }
    check(t, at == B * T, "(%d, %d): %d positions are in segments", B, T, at);
    free(s);
}

// every arrangement of ends of text in every batch of up to 12 positions
static void test_all_batches(Test* t) {
    for (int B = 1; B <= 12; B++) {
        for (int T = 1; B * T <= 12; T++) {
            for (int bits = 0; bits < 1 << (B * T); bits++) {
                int inputs[12];
                for (int i = 0; i < B * T; i++) { inputs[i] = bits >> i & 1 ? EOT : i; }
                check_segments(t, inputs, B, T);
            }
        }
    }
}

static void test_no_reset(Test* t) {
    int inputs[6] = {EOT, EOT, 1, EOT, 2, 3};
    Segment s[6];
    int n = documents_segments(s, inputs, 2, 3, NO_RESET);
    check(t, n == 1 && s[0].first == 0 && s[0].rows == 2 && s[0].T == 3, "%d segments, the first {%zu, %d, %d}", n,
          s[0].first, s[0].rows, s[0].T);
}

// ---- the token after the next ----

// what position i is asked by the definition; -1: nothing
static int after_next(const int* inputs, const int* targets, int i, int T) {
    if (i % T == T - 1 || targets[i + 1] < 0 || begins(inputs, i + 1, T)) { return -1; }
    if (i % T == T - 2) { return targets[i + 1] == EOT ? -1 : targets[i + 1]; }  // behind the row
    return begins(inputs, i + 2, T) ? -1 : targets[i + 1];
}

// the same where targets have the marks of conversations: in place of a target, where one begins
static void test_mtp_marks(Test* t) {
    for (int T = 1; T <= 12; T++) {
        for (int bits = 0; bits < 1 << T; bits++) {
            int inputs[12], targets[12], next[12], after[12];
            Segments s;
            for (int i = 0; i < T; i++) {
                inputs[i] = 20 + i;
                targets[i] = bits >> i & 1 ? MARK : 21 + i;
            }
            segments_init(&s, 1, T);
            s.document_start = MARK;
            segments_find_marked(&s, inputs, targets, 1, T);
            mtp_tokens(next, after, inputs, targets, &s, 1, T);
            for (int i = 0; i < T; i++) {
                const int is_other = i + 2 < T && targets[i + 2] == MARK;
                const int want = i == T - 1 || targets[i + 1] < 0 || is_other ? -1 : targets[i + 1];
                check(t, after[i] == want, "%d: %d is asked %d, expected %d", T, i, after[i], want);
            }
            free(s.at);
        }
    }
}

// every arrangement of ends of text in every batch of up to 12 positions, every third of which has no target
static void test_mtp_tokens(Test* t) {
    test_mtp_marks(t);
    for (int B = 1; B <= 12; B++) {
        for (int T = 1; B * T <= 12; T++) {
            for (int bits = 0; bits < 1 << (B * T); bits++) {
                const int N = B * T;
                int inputs[12], targets[12], next[12], after[12], n_counted = 0;
                Segments s;
                for (int i = 0; i < N; i++) { inputs[i] = bits >> i & 1 ? EOT : 20 + i; }
                for (int i = 0; i < N; i++) {
                    const int behind = (bits + i / T) % 2 ? 40 : EOT;  // the row
                    targets[i] = i % 3 == 2 ? -1 : i % T < T - 1 ? inputs[i + 1] : behind;
                }
                segments_init(&s, B, T);
                s.document_start = EOT;
                segments_find(&s, inputs, B, T);
                mtp_tokens(next, after, inputs, targets, &s, B, T);
                for (int i = 0; i < N; i++) {
                    const int want = after_next(inputs, targets, i, T);
                    check(t, next[i] == inputs[i % T < T - 1 ? i + 1 : i], "(%d, %d): next of %d", B, T, i);
                    check(t, after[i] == want, "(%d, %d): %d is asked %d, expected %d", B, T, i, after[i], want);
                    n_counted += want >= 0;
                }
                check(t, mtp_counted(inputs, targets, EOT, B, T) == n_counted, "(%d, %d): count", B, T);
                free(s.at);
            }
        }
    }
}

// ---- ops over segments ----

enum { V = 50, MAX_T = 64 };

// tensors of one batch, or of one sequence
typedef struct {
    int N, C, NH;
    int* tokens;                         // (N)
    float *encoded, *dencoded;           // (N, C)
    float *qkv, *dqkv;                   // (N, 3C)
    float *atty, *datty, *max, *inv;     // (N, C) twice, (N, NH) twice
} Tensors;

// outputs are NaN until an op writes them
static Tensors tensors_new(int N, int C, int NH) {
    Tensors x = {N,
                 C,
                 NH,
                 (int*)new_array((size_t)N, sizeof(int)),
                 filled_array((size_t)N * C, NAN),
                 random_array((size_t)N * C, 1.0f, 1),
                 random_array(3 * (size_t)N * C, 2.0f, 2),
                 filled_array(3 * (size_t)N * C, NAN),
                 filled_array((size_t)N * C, NAN),
                 random_array((size_t)N * C, 1.0f, 3),
                 filled_array((size_t)N * NH, NAN),
                 filled_array((size_t)N * NH, NAN)};
    return x;
}

static void tensors_drop(Tensors* x) {
    float* floats[] = {x->encoded, x->dencoded, x->qkv, x->dqkv, x->atty, x->datty, x->max, x->inv};
    for (int i = 0; i < 8; i++) { free(floats[i]); }
    free(x->tokens);
}

// what the trainer does with each segment
static void ops_over_segments(const Tensors* x, const Segment* segments, int n, const float* wte, const float* wpe,
                              float* dwte, float* dwpe, const Device* dev) {
    const int C = x->C, NH = x->NH;
    for (int k = 0; k < n; k++) {
        const Segment s = segments[k];
        const size_t at = s.first;
        embedding_forward(x->encoded + at * C, x->tokens + at, wte, wpe, s.rows, s.T, C, 0, dev);
        attention_forward(x->atty + at * C, x->max + at * NH, x->inv + at * NH, x->qkv + at * 3 * C, s.rows, s.T, C, NH,
                          0, dev);
    }
    for (int k = 0; k < n; k++) {
        const Segment s = segments[k];
        const size_t at = s.first;
        attention_backward(x->dqkv + at * 3 * C, x->datty + at * C, x->atty + at * C, x->max + at * NH,
                           x->inv + at * NH, x->qkv + at * 3 * C, s.rows, s.T, C, NH, dev);
        embedding_backward(dwte, dwpe, x->dencoded + at * C, x->tokens + at, s.rows, s.T, C, dev);
    }
}

// positions first .. first+T-1 of the batch, alone in tensors of exactly their size, as a batch of one row
static void check_alone(Test* t, const Tensors* batch, int first, int T, const float* wte, const float* wpe,
                        float* dwte, float* dwpe, const Device* dev) {
    const int C = batch->C, NH = batch->NH;
    const size_t at = (size_t)first, n = (size_t)T * C;
    const Segment whole = {0, 1, T};
    Tensors x = tensors_new(T, C, NH);
    memcpy(x.tokens, batch->tokens + at, sizeof(int) * (size_t)T);
    memcpy(x.qkv, batch->qkv + at * 3 * C, sizeof(float) * 3 * n);
    memcpy(x.datty, batch->datty + at * C, sizeof(float) * n);
    memcpy(x.dencoded, batch->dencoded + at * C, sizeof(float) * n);
    ops_over_segments(&x, &whole, 1, wte, wpe, dwte, dwpe, dev);
    check_bits(t, "encoded", batch->encoded + at * C, x.encoded, n);
    check_bits(t, "atty", batch->atty + at * C, x.atty, n);
    check_bits(t, "largest scores", batch->max + at * NH, x.max, (size_t)T * NH);
    check_bits(t, "1 / sum", batch->inv + at * NH, x.inv, (size_t)T * NH);
    check_bits(t, "dqkv", batch->dqkv + at * 3 * C, x.dqkv, 3 * n);
    tensors_drop(&x);
}

// a batch of documents with one chance in `one_in` for each position to begin one
static void check_batch(Test* t, int B, int T, int C, int NH, uint32_t one_in, const Device* dev) {
    const size_t n_wte = (size_t)V * C, n_wpe = (size_t)MAX_T * C;
    Tensors x = tensors_new(B * T, C, NH);
    Segment* segments = (Segment*)new_array((size_t)B * T, sizeof(Segment));
    float *wte = random_array(n_wte, 1.0f, 4), *wpe = random_array(n_wpe, 1.0f, 5);
    float *dwte = random_array(n_wte, 1.0f, 6), *dwpe = random_array(n_wpe, 1.0f, 7);  // an op before has begun them
    float *dwte_alone = copied_array(dwte, n_wte), *dwpe_alone = copied_array(dwpe, n_wpe);
    uint64_t s = seeded_stream(one_in);
    for (int i = 0; i < B * T; i++) {
        uint32_t token = 8 + xorshift_u32(&s) % (V - 8);
        x.tokens[i] = xorshift_u32(&s) % one_in == 0 ? EOT : (int)token;
    }
    int n = documents_segments(segments, x.tokens, B, T, EOT);
    ops_over_segments(&x, segments, n, wte, wpe, dwte, dwpe, dev);
    for (int first = 0, end; first < B * T; first = end) {
        for (end = first + 1; end < B * T && !begins(x.tokens, end, T); end++) {}
        check_alone(t, &x, first, end - first, wte, wpe, dwte_alone, dwpe_alone, dev);
    }
    check_bits(t, "dwte", dwte, dwte_alone, n_wte);
    check_bits(t, "dwpe", dwpe, dwpe_alone, n_wpe);
    float* arrays[] = {wte, wpe, dwte, dwpe, dwte_alone, dwpe_alone};
    for (int i = 0; i < 6; i++) { free(arrays[i]); }
    free(segments);
    tensors_drop(&x);
}

static void test_alone(Test* t) {
    const struct { int B, T, C, NH; uint32_t one_in; } cases[] = {
        {1, 1, 4, 1, 2}, {1, 64, 24, 3, 9}, {3, 33, 20, 2, 5}, {2, 64, 64, 2, 40}, {4, 17, 12, 4, 1}, {2, 50, 16, 1,
                                                                                                       1000000},
    };
    for (int i = 0; i < N_TEST_THREADS; i++) {
        Device dev = test_device(test_threads(i));
        for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
            check_batch(t, cases[k].B, cases[k].T, cases[k].C, cases[k].NH, cases[k].one_in, &dev);
        }
        device_free(&dev);
    }
}

// other text and other gradients in the second document: not a bit of the first or the third changes
static void test_neighbours(Test* t) {
    enum { T = 30, C = 24, NH = 3, FIRST = 9, LAST = 21 };
    Device dev = test_device(2);
    Tensors a = tensors_new(T, C, NH), b = tensors_new(T, C, NH);
    Segment segments[T];
    float *wte = random_array(V * C, 1.0f, 4), *wpe = random_array(MAX_T * C, 1.0f, 5),
          *dwte = filled_array(V * C, 0.0f);
    float* dwpe = filled_array(MAX_T * C, 0.0f);
    for (int i = 0; i < T; i++) { a.tokens[i] = b.tokens[i] = i == FIRST || i == LAST ? EOT : 8 + i; }
    for (int i = FIRST + 1; i < LAST; i++) { b.tokens[i] = 8; }
    sprinkle(b.qkv + (size_t)FIRST * 3 * C, (LAST - FIRST) * 3 * C, 3, 8);  // infinities and NaN
    sprinkle(b.datty + (size_t)FIRST * C, (LAST - FIRST) * C, 3, 9);
    ops_over_segments(&a, segments, documents_segments(segments, a.tokens, 1, T, EOT), wte, wpe, dwte, dwpe, &dev);
    ops_over_segments(&b, segments, documents_segments(segments, b.tokens, 1, T, EOT), wte, wpe, dwte, dwpe, &dev);
    const size_t end = LAST * C;
    check_bits(t, "atty before", a.atty, b.atty, FIRST * C);
    check_bits(t, "atty after", a.atty + end, b.atty + end, (T - LAST) * C);
    check_bits(t, "dqkv before", a.dqkv, b.dqkv, FIRST * 3 * C);
    check_bits(t, "dqkv after", a.dqkv + 3 * end, b.dqkv + 3 * end, (T - LAST) * 3 * C);
    check_bits(t, "the third begins at position 0", a.encoded + end, b.encoded + end, C);
    for (int c = 0; c < C; c++) {
        check(t, a.encoded[end + c] == wte[EOT * C + c] + wpe[c], "channel %d of the third document's first position",
              c);
    }
    tensors_drop(&a);
    tensors_drop(&b);
    float* arrays[] = {wte, wpe, dwte, dwpe};
    for (int i = 0; i < 4; i++) { free(arrays[i]); }
    device_free(&dev);
}

// ---- the whole model ----

// positions first .. first+T-1 of a batch as a sequence of their own, through every layer and back
static void check_model_alone(Test* t, GPT2* gpt2, const Activations* batch, const float* batch_logits, const int* tokens,
                              const int* targets, size_t first, int T, const Device* dev) {
    const Config c = gpt2->config;
    const size_t n = (size_t)T * c.C;
    const ActivationTensors all = layer_activations(batch, 0);
    Activations acts;
    float loss;
    activations_init(&acts, c, 1, T, TO_TRAIN, &(ArenaSlots){0});
    gpt2_forward(gpt2, &acts, tokens + first, 1, T, 0, dev);
    check_bits(t, "logits", gpt2_logits(gpt2, &acts, 0, T, dev), batch_logits + first * c.Vp, (size_t)T * c.Vp);
    gpt2_losses(gpt2, &acts, targets + first, T, dev);
    const ActivationTensors a = layer_activations(&acts, 0);
    check_bits(t, "losses", a.losses, all.losses + first, (size_t)T);
    gpt2_head_backward(gpt2, &acts, targets + first, 0.01f, T, dev);
    gpt2_backward(gpt2, &acts, tokens + first, 1, T, dev);
    dp_leaf_done(&gpt2->model.dp, dev);
    dp_reduce(&gpt2->model.dp, &loss, dev);
    check_bits(t, "gradient of the embedding", a.dresidual, all.dresidual + first * c.C, n);
    activations_free(&acts);
}

static void test_model(Test* t) {
    enum { B = 2, T = 40, N = B * T };
    const Config c = config_make(64, V, 2, 2, 32);
    int tokens[N], targets[N];
    uint64_t s = seeded_stream(3);
    GPT2 gpt2;
    Activations acts;
    Device dev = test_device(2);
    gpt2_init(&gpt2, c, sizeof(float));
    model_init_training(&gpt2.model, NULL, 1, 0, 0);
    float *params = random_array(gpt2.model.n, 0.3f, 8), loss;
    memcpy(model_floats(&gpt2.model), params, sizeof(float) * gpt2.model.n);
    for (int i = 0; i < N; i++) {
        int other = 8 + (int)(xorshift_u32(&s) % (V - 8));
        tokens[i] = xorshift_u32(&s) % 8 == 0 ? EOT : other;
        targets[i] = xorshift_u32(&s) % 5 == 0 ? -1 : other;
    }
    activations_init(&acts, c, B, T, TO_TRAIN, &(ArenaSlots){0});
    acts.segments.document_start = EOT;
    gpt2_forward(&gpt2, &acts, tokens, B, T, 0, &dev);
    float* logits = copied_array(gpt2_logits(&gpt2, &acts, 0, N, &dev), (size_t)N * c.Vp);
    gpt2_leaf(&gpt2, &acts, tokens, targets, 0.01f, B, T, &dev);
    dp_reduce(&gpt2.model.dp, &loss, &dev);
    check(t, acts.segments.n > 5, "%d segments say little", acts.segments.n);
    for (int i = 0; i < acts.segments.n; i++) {
        check_model_alone(t, &gpt2, &acts, logits, tokens, targets, acts.segments.at[i].first, acts.segments.at[i].T, &dev);
    }
    acts.segments.document_start = NO_RESET;
    gpt2_forward(&gpt2, &acts, tokens, B, T, 0, &dev);
    const float* without = gpt2_logits(&gpt2, &acts, 0, N, &dev);
    check(t, memcmp(logits, without, sizeof(float) * (size_t)N * c.Vp) != 0, "the reset has no effect");
    free(params);
    free(logits);
    activations_free(&acts);
    model_free(&gpt2.model);
    device_free(&dev);
}

int main(int argc, char** argv) {
    Promise promises[] = {
        {"all batches", "each position is in one segment, which begins where a row or a document does",
         test_all_batches},
        {"no reset", "one segment holds the whole batch", test_no_reset},
        {"the token after the next", "its target counts within a document and a row alone", test_mtp_tokens},
        {"alone", "embedding and attention give the bits of each piece as a sequence of its own", test_alone},
        {"model", "gives each piece the logits, losses and gradients of a sequence of its own", test_model},
        {"neighbours", "what stands in one document, infinities and NaN too, touches no other", test_neighbours},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
