/*
Promises of llmc/models/vocabulary.h, and so of the chains of llmc/ranks/tensor_parallel.h: 2 to 5 forked ranks that
share a vocabulary find what a rank finds that has all of it, to the last bit: rows of the embedding, losses, logits and
all gradients. Fast builds for GPUs join sums and are compared as trainers (dev/test_gpus.sh).
*/
#include "llmc/models/lm_head.h"  // lm_head_losses, lm_head_logits
#include "llmc/test/ranks.h"      // run_ranks

#if CROSSENTROPY_CHAINS
enum { VP = 120, C = 9, MOST = 67, ROOM = 1 << 16 };  // 1 to 5 ranks divide VP
#define DLOSS 0.03f

typedef struct {
    int N, V, head_rows;  // of N positions so many have logits at once
    int tokens[MOST], targets[MOST];
    float *table, *norm, *dencoded, *before, *nothing;
} Problem;

// what a rank finds; of dembedding and dweight its own rows
typedef struct {
    float encoded[MOST * C], losses[MOST], evaluated[MOST], logits[MOST * VP], dnorm[MOST * C], dembedding[VP * C],
        dweight[VP * C];
} Found;

// rows of padding, rows of -0, tokens that come often, targets that do not count
static Problem problem(int N, int V, int head_rows) {
    Problem p = {N, V, head_rows, {0}, {0}, random_array(VP * C, 2.0f, 1), random_array(MOST * C, 2.0f, 2),
                 random_array(MOST * C, 2.0f, 3), random_array(VP * C, 2.0f, 4), filled_array(ROOM, NAN)};
    uint64_t s = seeded_stream((uint64_t)(100 * N + V));
    for (int i = 0; i < VP * C; i++) { p.table[i] = i >= V * C ? 0.0f : i / C % 5 == 0 ? -0.0f : p.table[i]; }
    for (int n = 0; n < N; n++) {
        const uint32_t u = xorshift_u32(&s);
        p.tokens[n] = n % 3 == 0 ? V - 1 : (int)(u % (uint32_t)V);
        p.targets[n] = n > 20 && n % 4 == 1 ? -1 : n % 4 == 2 ? V / 2 : (int)(u / 7 % (uint32_t)V);
    }
    return p;
}

static void problem_free(Problem* p) {
    free(p->table), free(p->norm), free(p->dencoded), free(p->before), free(p->nothing);
}

static void find_rows(Found* f, const Problem* p, Linear w, const Device* dev) {
    const size_t own = (size_t)(w.OC * C), all = (size_t)(p->N * C);
    float *encoded = to_device(p->nothing, all, dev), *dencoded = to_device(p->dencoded, all, dev),
          *dembedding = to_device(p->before + (size_t)w.tp->place * own, own, dev);
    int* tokens = ints_to_device(p->tokens, (size_t)p->N, dev);
    vocabulary_rows(encoded, tokens, w, p->N, dev);
    vocabulary_rows_backward(dembedding, dencoded, tokens, w, p->N, dev);
    from_device(f->encoded, encoded, all, dev), from_device(f->dembedding, dembedding, own, dev);
    device_drop(dencoded), device_drop(tokens);
}

static void find_head(Found* f, const Problem* p, Linear w, const Device* dev) {
    const size_t own = (size_t)(w.OC * C), all = (size_t)(p->N * C), N = (size_t)p->N;
    float *norm = to_device(p->norm, all, dev), *dnorm = to_device(p->nothing, all, dev),
          *logits = to_device(p->nothing, (size_t)(p->head_rows * w.OC), dev), *losses = to_device(p->nothing, N, dev),
          *dweight = to_device(p->nothing, own, dev);
    const LmHead head = {w, norm, dnorm, logits, losses, p->head_rows, p->V};
    TokenBatch batch;
    memset(&batch, 0, sizeof batch);
    token_batch_open(&batch, 1, p->N, NULL);
    batch.least_gap = 1;
    token_batch_targets(&batch, p->targets, p->N, dev);
    for (int n = 0; n < p->N; n++) {
        device_download(f->logits + n * VP, lm_head_logits(&head, n, 1, dev), sizeof(float) * VP, dev);
    }
    lm_head_losses(&head, &batch, 0, NULL, 0.0f, p->N, dev);
    device_download(f->evaluated, losses, sizeof(float) * N, dev);
    lm_head_losses(&head, &batch, 1, dweight, DLOSS, p->N, dev);
    token_batch_close(&batch);
    from_device(f->losses, losses, N, dev), from_device(f->dnorm, dnorm, all, dev);
    from_device(f->dweight, dweight, own, dev), device_drop(norm), device_drop(logits);
}

static Found* find(const Problem* p, const RankGroup* group, const Device* dev) {
    Found* f = (Found*)new_array(1, sizeof(Found));
    const int R = VP / group->size;
    float *weight = to_device(p->table + group->place * R * C, (size_t)(R * C), dev),
          *room = to_device(p->nothing, ROOM, dev);
    const StoredMatrix matrix = stored_matrix(weight, STORED_F32, R, C, R, NULL);
    Linear w;
    memset(&w, 0, sizeof w);
    w.weight = matrix, w.C = C, w.OC = R, w.tp = group, w.room = room;
    w.split = group->size > 1 ? SPLIT_VOCABULARY : SPLIT_NONE;
    find_rows(f, p, w, dev);
    find_head(f, p, w, dev);
    device_drop(weight), device_drop(room);
    return f;
}

// this group against a rank that has everything; in all 3 * 4 problems
static void ranks_share(Test* t, Comm* c, int number) {
    const int sizes[][2] = {{1, 1}, {3, 2}, {33, 33}, {MOST, 16}}, vocabularies[] = {VP, 97, 49};
    RankGroup group = rank_group_init(c, c->size), alone = rank_group_init(c, 1);
    Device dev = rank_device(c);
    (void)number;
    alone.place = 0;
    comm_device_open(c);
    for (int i = 0; i < 12; i++) {
        Problem p = problem(sizes[i / 3][0], vocabularies[i % 3], sizes[i / 3][1]);
        Found *found = find(&p, &group, &dev), *whole = find(&p, &alone, &dev);
        const int own = VP / c->size * C, at = group.place * own, N = p.N;
        check_bits(t, "rows of the embedding", found->encoded, whole->encoded, (size_t)(N * C));
        check_bits(t, "gradient of the embedding", found->dembedding, whole->dembedding + at, (size_t)own);
        check_bits(t, "logits", found->logits, whole->logits, (size_t)(N * VP));
        check_bits(t, "losses", found->losses, whole->losses, (size_t)N);
        check_bits(t, "losses without gradients", found->evaluated, whole->losses, (size_t)N);
        check_bits(t, "gradient of the norm's output", found->dnorm, whole->dnorm, (size_t)(N * C));
        check_bits(t, "gradient of the output matrix", found->dweight, whole->dweight + at, (size_t)own);
        free(found), free(whole);
        problem_free(&p);
    }
    device_free(&dev);
    rank_group_free(&group);
}

static void test_shared(Test* t) {
    const int most = device_ranks(t, 5);
    for (int size = 2; size <= most; size++) { run_ranks(t, size, ranks_share, 0); }
}

// each rank sends what vocabulary_sends_* say, of N positions
static void ranks_send(Test* t, Comm* c, int N) {
    RankGroup group = rank_group_init(c, c->size);
    Device dev = rank_device(c);
    Problem p = problem(60, 97, 60);
    Model m;
    memset(&m, 0, sizeof m);
    m.tp = group;
    for (int n = 0; n < p.N; n++) { p.targets[n] = n; }  // one stretch
    comm_device_open(c);
    float* weight = to_device(p.table + group.place * VP / c->size * C, (size_t)(VP / c->size * C), &dev);
    float* room = to_device(p.nothing, ROOM, &dev);
    const StoredMatrix matrix = stored_matrix(weight, STORED_F32, VP / c->size, C, VP / c->size, NULL);
    Linear w;
    memset(&w, 0, sizeof w);
    w.weight = matrix, w.C = C, w.OC = VP / c->size, w.tp = &group, w.room = room, w.split = SPLIT_VOCABULARY;
    float *x = to_device(p.nothing, 60 * C, &dev), *logits = to_device(p.nothing, 60 * VP, &dev);
    int* targets = ints_to_device(p.targets, 60, &dev);
    const uint64_t before = c->link->bytes_sent;
    vocabulary_rows(x, targets, w, N, &dev);
    const uint64_t rows = c->link->bytes_sent - before;
    vocabulary_crossentropy(x, logits, targets, DLOSS, 1, &w, p.V, N, &dev);
    vocabulary_backward(x, NULL, logits, x, &w, 0, N, &dev);
    const double head = (double)(c->link->bytes_sent - before - rows);
    const double of_rows = vocabulary_sends_rows(&m, C, N), of_head = vocabulary_sends_head(&m, C, N);
    check(t, fabs((double)rows - of_rows) < 0.5, "%d positions, %d ranks, rows: sent %.0f bytes, planned %.0f", N,
          c->size, (double)rows, of_rows);
    check(t, fabs(head - of_head) < 0.5, "%d positions, %d ranks, head: sent %.0f bytes, planned %.0f", N,
          c->size, head, of_head);
    device_drop(weight), device_drop(room), device_drop(x), device_drop(logits), device_drop(targets);
    problem_free(&p);
    device_free(&dev);
    rank_group_free(&group);
}

static void test_sent(Test* t) {
    const int most = device_ranks(t, 5);
    setenv("COMM_CHECK", "0", 1);  // it sends, too
    for (int size = 2; size <= most; size++) { run_ranks(t, size, ranks_send, 60), run_ranks(t, size, ranks_send, 59); }
    setenv("COMM_CHECK", "1", 1);
}
#else
static void test_shared(Test* t) { skip(t, "for builds with the bits of the plain loops"); }
static void test_sent(Test* t) { skip(t, "the same"); }
#endif

int main(int argc, char** argv) {
    Promise promises[] = {
        {"shared", "the bits of one rank on 2 to 5, fewer positions than ranks, ranks without a token", test_shared},
        {"sent", "each of 2 to 5 ranks sends the bytes that the plan has for it", test_sent},
    };
    setenv("COMM_CHECK", "1", 1);
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
