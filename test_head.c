/*
Promises of llmc/models/head.h: each head, with prototypes that are fixed or learnt, in as many dimensions as the
features or in others, against a computation in double; its scores against counting by hand; its keys of config.json.
What the ops round is in test_hpn.c and test_crossentropy.c, a model with each head in test_mamba_hpn.c.
*/
#include "llmc/models/head.h"
#include "llmc/core/tensor_arena.h"
#include "llmc/test/test.h"

enum { KINDS = 5 };

// the heads that there are
static HeadConfig config_of(int i, int C, int classes) {
    HeadConfig h = head_config(C, classes);
    h.kind = i == 0 ? HEAD_CE : i < 3 ? HEAD_HPN : HEAD_HPN_SOFTMAX;
    h.Dp = i == 2 || i == 4 ? C - 2 : C;
    h.learns_prototypes = i == 1 || i == 4;
    h.scale = 6.0f;
    return h;
}

// one head with its inputs, and what a pass leaves
typedef struct {
    HeadConfig config;
    Head head;
    TensorArena tensors;
    HeadPass pass;
    int N, *targets;
    float* features;
    Device dev;
} Subject;

static size_t count(const HeadConfig* h, int which) {
    const int has = head_has_prototypes(h);
    return which == 0   ? (size_t)(has ? 0 : h->classes * h->C)
           : which == 1 ? (size_t)(has ? h->classes * h->Dp : 0)
                        : (size_t)(head_has_projection(h) ? h->Dp * h->C : 0);
}

static float* values(const HeadConfig* h, int which) {
    const size_t n = count(h, which);
    return n > 0 ? random_array(n, 1.0f, 10 + (uint64_t)which) : NULL;
}

static Subject subject_open(int i, int N, int C, int classes) {
    Subject s;
    memset(&s, 0, sizeof s);
    s.config = config_of(i, C, classes);
    s.N = N;
    s.dev = test_device(2);
    s.features = random_array((size_t)N * C, 1.0f, 3);
    s.targets = (int*)new_array((size_t)N, sizeof(int));
    uint64_t random = 5;
    for (int n = 0; n < N; n++) { s.targets[n] = n % 5 == 3 ? -1 : (int)(xorshift_u32(&random) % (uint32_t)classes); }
    head_init(&s.head, &s.config);
    tensor_arena_layout(&s.tensors, head_activations(s.tensors.table, 0, &s.config, N, TO_TRAIN), sizeof(float));
    tensor_arena_open(&s.tensors, "activations");
    tensor_arena_point(&s.tensors, &s.pass.a, 0);
    const HeadTensors p = {values(&s.config, 0), values(&s.config, 1), values(&s.config, 2)};
    s.pass.p = p;
    s.pass.features = s.features;
    head_update_prototypes(&s.head, p.prototypes, &s.dev);
    return s;
}

static const HeadPass* pass_of(Subject* s) {
    s->pass.head = &s->head;
    return &s->pass;
}

static void subject_close(Subject* s) {
    tensor_arena_close(&s->tensors);
    head_free(&s->head);
    device_free(&s->dev);
    free(s->pass.p.matrix), free(s->pass.p.prototypes), free(s->pass.p.projection);
    free(s->features), free(s->targets);
}

// ---- losses and gradients ----

static void unit_double(double* unit, const double* x, int D) {
    double square = 0.0;
    for (int i = 0; i < D; i++) { square += x[i] * x[i]; }
    for (int i = 0; i < D; i++) { unit[i] = x[i] / sqrt(square); }
}

static double dot_double(const double* a, const double* b, int D) {
    double sum = 0.0;
    for (int i = 0; i < D; i++) { sum += a[i] * b[i]; }
    return sum;
}

// scores of one position: with every row of the matrix, or the cosines to all prototypes
static void scores_double(double* scores, const HeadConfig* h, const double* feature, const double* matrix,
                          const double* prototypes, const double* projection) {
    double z[16], unit[16], prototype[16];
    for (int k = 0; k < h->classes && !head_has_prototypes(h); k++) {
        scores[k] = dot_double(feature, matrix + k * h->C, h->C);
    }
    if (!head_has_prototypes(h)) { return; }
    for (int i = 0; i < h->Dp; i++) {
        z[i] = head_has_projection(h) ? dot_double(feature, projection + i * h->C, h->C) : feature[i];
    }
    unit_double(unit, z, h->Dp);
    for (int k = 0; k < h->classes; k++) {
        unit_double(prototype, prototypes + k * h->Dp, h->Dp);
        scores[k] = dot_double(unit, prototype, h->Dp);
    }
}

static double log_sum_exp(const double* x, int n) {
    double sum = 0.0;
    for (int i = 0; i < n; i++) { sum += exp(x[i]); }
    return log(sum);
}

// x: features, matrix, prototypes, projection
static void losses_double(double* losses, const double* x, const Subject* s) {
    const HeadConfig* h = &s->config;
    const double *matrix = x + s->N * h->C, *prototypes = matrix + count(h, 0), *projection = prototypes + count(h, 1);
    double scores[32];
    for (int n = 0; n < s->N; n++) {
        losses[n] = 0.0;
        if (s->targets[n] < 0) { continue; }
        scores_double(scores, h, x + n * h->C, matrix, prototypes, projection);
        const double score = scores[s->targets[n]];
        for (int k = 0; k < h->classes; k++) { scores[k] *= h->kind == HEAD_HPN_SOFTMAX ? (double)h->scale : 1.0; }
        losses[n] = h->kind == HEAD_HPN ? (1.0 - score) * (1.0 - score)
                                        : log_sum_exp(scores, h->classes) - scores[s->targets[n]];
    }
}

static double loss_double(const double* x, void* subject) {
    double losses[64], sum = 0.0;
    const Subject* s = (const Subject*)subject;
    losses_double(losses, x, s);
    for (int n = 0; n < s->N; n++) { sum += losses[n] / s->N; }
    return sum;
}

static double* inputs_double(const Subject* s) {
    const HeadTensors p = s->pass.p;
    const float* parts[] = {s->features, p.matrix, p.prototypes, p.projection};
    const size_t n[] = {(size_t)s->N * s->config.C, count(&s->config, 0), count(&s->config, 1), count(&s->config, 2)};
    double* x = (double*)new_array(n[0] + n[1] + n[2] + n[3], sizeof(double));
    for (size_t part = 0, at = 0; part < 4; at += n[part++]) {
        for (size_t i = 0; i < n[part]; i++) { x[at + i] = (double)parts[part][i]; }
    }
    return x;
}

static void forward(Subject* s) {
    head_forward(pass_of(s), s->N, &s->dev);
    if (!head_reads_out(s->config.kind)) { head_logits(pass_of(s), 0, s->N, &s->dev); }
    head_losses(pass_of(s), s->targets, s->N, &s->dev);
}

// d: which gradients are asked for
static HeadTensors backward(Subject* s, float* dfeatures, int asks_prototypes, int asks_projection) {
    const HeadConfig* h = &s->config;
    HeadTensors d = {NULL, NULL, NULL};
    if (count(h, 0) > 0) { d.matrix = filled_array(count(h, 0), NAN); }
    if (count(h, 1) > 0 && h->learns_prototypes && asks_prototypes) { d.prototypes = filled_array(count(h, 1), NAN); }
    if (count(h, 2) > 0 && asks_projection) { d.projection = filled_array(count(h, 2), NAN); }
    head_backward(pass_of(s), dfeatures, d, s->targets, 1.0f / (float)s->N, s->N, &s->dev);
    return d;
}

static void tensors_free(HeadTensors d) { free(d.matrix), free(d.prototypes), free(d.projection); }

static void check_differences(Test* t, int i) {
    Subject s = subject_open(i, 11, 7, 9);
    const HeadConfig* h = &s.config;
    const size_t n = (size_t)s.N * h->C;
    double *x = inputs_double(&s), losses[64];
    size_t n_all = n;
    for (int which = 0; which < 3; which++) { n_all += count(h, which); }
    double* want = finite_differences(loss_double, x, n_all, &s);
    float* dfeatures = filled_array(n, NAN);
    forward(&s);
    losses_double(losses, x, &s);
    check_close(t, "losses", s.pass.a.losses, losses, (size_t)s.N, rounding_walk(64, 8.0));  // below 8
    const HeadTensors d = backward(&s, dfeatures, 1, 1);
    const double tolerance = rounding_walk(128, 2.0);  // chains of up to 11 terms below 2, twice through a division
    const double* at = want + n;
    check_close(t, "dfeatures", dfeatures, want, n, tolerance);
    if (d.matrix) { check_close(t, "dmatrix", d.matrix, at, count(h, 0), tolerance); }
    at += count(h, 0);
    if (d.prototypes) { check_close(t, "dprototypes", d.prototypes, at, count(h, 1), tolerance); }
    at += count(h, 1);
    if (d.projection) { check_close(t, "dprojection", d.projection, at, count(h, 2), tolerance); }
    tensors_free(d);
    free(x), free(want), free(dfeatures);
    subject_close(&s);
}

static void test_differences(Test* t) {
    for (int i = 0; i < KINDS; i++) { check_differences(t, i); }
}

// gradients that nobody asks for: the others keep their bits, in a second pass as in the first
static void check_asked(Test* t, int i, int asked) {
    Subject s = subject_open(i, 11, 7, 9);
    float *all = filled_array(11 * 7, NAN), *some = filled_array(11 * 7, NAN);
    forward(&s);
    const HeadTensors want = backward(&s, all, 1, 1);
    forward(&s);
    const HeadTensors d = backward(&s, some, asked & 1, asked >> 1);
    check_bits(t, "dfeatures", some, all, 11 * 7);
    if (d.prototypes) { check_bits(t, "dprototypes", d.prototypes, want.prototypes, count(&s.config, 1)); }
    if (d.projection) { check_bits(t, "dprojection", d.projection, want.projection, count(&s.config, 2)); }
    tensors_free(want), tensors_free(d);
    free(all), free(some);
    subject_close(&s);
}

static void test_asked(Test* t) {
    for (int asked = 0; asked < 4; asked++) {
        check_asked(t, 1, asked);
        check_asked(t, 4, asked);
    }
}

// logits of some positions are those rows of all
static void test_pieces(Test* t) {
    for (int i = 0; i < KINDS; i++) {
        Subject s = subject_open(i, 11, 7, 9);
        head_forward(pass_of(&s), s.N, &s.dev);
        float* all = copied_array(head_logits(pass_of(&s), 0, s.N, &s.dev), 11 * 9);
        check_bits(t, "logits", head_logits(pass_of(&s), 4, 3, &s.dev), all + 4 * 9, 3 * 9);
        free(all);
        subject_close(&s);
    }
}

// learnt prototypes: beta times the mean cosine to the nearest, added to what stands there, moves them apart
static void test_separate(Test* t) {
    Subject s = subject_open(1, 1, 3, 8);
    const size_t n = count(&s.config, 1);
    float *d = filled_array(n, 0.0f), *prototypes = s.pass.p.prototypes;
    const float before = head_separate(&s.head, d, 10.0f, &s.dev);
    for (size_t i = 0; i < n; i++) { prototypes[i] -= 1e-3f * d[i]; }
    head_update_prototypes(&s.head, prototypes, &s.dev);
    float* twice = copied_array(d, n);
    const float after = head_separate(&s.head, twice, 10.0f, &s.dev);
    check(t, after < before && before <= 10.0f, "the loss was %g, is %g", (double)before, (double)after);
    float* again = filled_array(n, 0.0f);
    head_separate(&s.head, again, 10.0f, &s.dev);
    for (size_t i = 0; i < n; i++) { again[i] += d[i]; }
    check_bits(t, "added", twice, again, n);
    free(d), free(twice), free(again);
    subject_close(&s);
}

// x: prototypes as stored
static double separation_double(const double* x, void* subject) {
    const HeadConfig* h = &((const Subject*)subject)->config;
    double unit[8][16], sum = 0.0;
    for (int k = 0; k < h->classes; k++) { unit_double(unit[k], x + k * h->Dp, h->Dp); }
    for (int k = 0; k < h->classes; k++) {
        double most = -1.0;
        for (int j = 0; j < h->classes; j++) { most = fmax(most, j == k ? -1.0 : dot_double(unit[k], unit[j], h->Dp)); }
        sum += most / h->classes;
    }
    return 10.0 * sum;
}

static void test_separate_differences(Test* t) {
    Subject s = subject_open(1, 1, 3, 8);
    const size_t n = count(&s.config, 1);
    float* d = filled_array(n, 0.0f);
    double *x = double_array(s.pass.p.prototypes, n), *want = finite_differences(separation_double, x, n, &s);
    const float loss = head_separate(&s.head, d, 10.0f, &s.dev);
    check(t, fabs((double)loss - separation_double(x, &s)) < 1e-5, "the loss is %g", (double)loss);
    check_close(t, "dprototypes", d, want, n, rounding_walk(64, 20.0));  // sums of 8 terms below 20
    free(d), free(x), free(want);
    subject_close(&s);
}

// ---- scores ----

// the probability that hpn_readout gives a cosine, up to the sum over all of them
static double odds(double cosine) {
    const double kept = fmax(cosine, 0x1p-24);
    return kept / (1.0 - kept);
}

// mean cosine of all pairs of positions whose targets count: fewer than HPN_PAIRS_SAMPLE
static double pairs_double(const Subject* s, const double* x) {
    const HeadConfig* h = &s->config;
    const double* projection = x + s->N * h->C + count(h, 0) + count(h, 1);
    double sum[16] = {0}, z[16], unit[16], n = 0.0;
    for (int i = 0; i < s->N; i++) {
        if (s->targets[i] < 0) { continue; }
        for (int d = 0; d < h->Dp; d++) {
            const double* feature = x + i * h->C;
            z[d] = head_has_projection(h) ? dot_double(feature, projection + d * h->C, h->C) : feature[d];
        }
        unit_double(unit, z, h->Dp);
        for (int d = 0; d < h->Dp; d++) { sum[d] += unit[d]; }
        n += 1.0;
    }
    return (dot_double(sum, sum, h->Dp) - n) / (n * (n - 1.0));
}

static void check_scores(Test* t, int i) {
    enum { CLASSES = 9, C = 7 };
    Subject s = subject_open(i, i < 3 ? 300 : 20, C, CLASSES);  // more than hpn computes at a time
    const HeadConfig* h = &s.config;
    const double *x = inputs_double(&s), *matrix = x + s.N * C, *prototypes = matrix + count(h, 0);
    double want[N_SCORES] = {0}, scores[CLASSES];
    HeadScores found;
    for (int n = 0; n < s.N; n++) {
        if (s.targets[n] < 0) { continue; }
        scores_double(scores, h, x + n * C, matrix, prototypes, prototypes + count(h, 1));
        int rank = 0;
        double sum = 0.0;
        for (int k = 0; k < CLASSES; k++) {
            rank += scores[k] > scores[s.targets[n]];
            sum += odds(scores[k]);
        }
        const double cosine = scores[s.targets[n]];
        want[SCORE_COUNTED] += 1.0;
        want[SCORE_TOP1] += rank < 1;
        want[SCORE_TOP5] += rank < 5;
        want[SCORE_COSINE] += h->kind == HEAD_CE ? 0.0 : cosine;
        if (h->kind == HEAD_HPN) { want[SCORE_LOG_LOSS] += log(sum) - log(odds(cosine)); }
    }
    head_scores_init(&found, s.N);
    head_forward(pass_of(&s), s.N, &s.dev);
    head_scores_losses(&found, pass_of(&s), s.targets, s.N, &s.dev);
    head_scores_rest(&found, pass_of(&s), s.targets, s.N, &s.dev);
    for (int k = 0; k < SCORE_PAIRS; k++) {  // sums of 300 numbers, each within a few roundings
        check(t, fabs(found.sums[k] - want[k]) <= 1e-4 * (1.0 + want[k]), "head %d, score %d: expected %g, found %g", i,
              k, want[k], found.sums[k]);
    }
    want[SCORE_PAIRS] = h->kind == HEAD_CE ? 0.0 : pairs_double(&s, x);
    check(t, fabs(found.sums[SCORE_PAIRS] - want[SCORE_PAIRS]) < 1e-5, "head %d, pairs: expected %g, found %g", i,
          want[SCORE_PAIRS], found.sums[SCORE_PAIRS]);
    check(t, found.sums[SCORE_BATCHES] == 1.0, "one batch, found %g", found.sums[SCORE_BATCHES]);
    head_scores_free(&found);
    free((void*)x);
    subject_close(&s);
}

static void test_scores(Test* t) {
    for (int i = 0; i < KINDS; i++) { check_scores(t, i); }
}

// ---- config.json ----

static void test_config(Test* t) {
    for (int i = 0; i < KINDS; i++) {
        HeadConfig h = config_of(i, 7, 9), read = head_config(7, 9);
        ErrorText error;
        h.is_classifier = i % 2;
        h.tied = !h.is_classifier;
        read.scale = h.kind == HEAD_CE && !h.is_classifier ? h.scale : read.scale;  // a language model has no such key
        json_t* json = json_object();
        head_to_json(json, &h);
        const int is_read = head_parse(&read, json, &error);
        check(t, is_read && memcmp(&read, &h, sizeof h) == 0, "head %d came back as another", i);
        check(t, head_is_same(&read, &h), "head %d does not take its own parameters", i);
        for (int field = 0; field < 4; field++) {
            HeadConfig other = h;
            other.classes += field == 0;
            other.tied ^= field == 1;
            other.Dp += field == 2;
            other.kind = field == 3 ? (h.kind == HEAD_CE ? HEAD_HPN : HEAD_CE) : h.kind;
            const int has_field = field != 2 || head_has_prototypes(&h);
            check(t, head_is_same(&other, &h) == !has_field, "head %d takes those of another, field %d", i, field);
        }
        json_decref(json);
    }
}

int main(int argc, char** argv) {
    const Promise promises[] = {
        {"differences", "losses and gradients of each head agree with double and finite differences",
         test_differences},
        {"asked", "gradients that nobody asks for are NULL: the others keep their bits", test_asked},
        {"pieces", "logits of some positions are those of all", test_pieces},
        {"separate", "a step along its gradient moves prototypes apart; the gradient is added", test_separate},
        {"separate differences", "its loss and gradient agree with double and finite differences",
         test_separate_differences},
        {"scores", "right answers, cosines and the loss read out are those counted by hand, in pieces too",
         test_scores},
        {"config.json", "a head comes back as it was written; another one's parameters do not fit",
         test_config},
    };
    return test_main(argc, argv, promises, sizeof promises / sizeof promises[0]);
}
