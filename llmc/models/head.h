/*
What a model answers with: from the last hidden state of each position, `features` (N, C), to a loss over `classes`,
which are the tokens of the vocabulary or, of a classifier, classes of its own.
    ce            logits = features @ matrix^T, cross entropy. The matrix may be the embedding
    hpn           z_unit = unit(projection(features)); every class has a unit vector, its prototype; the loss is
                  (1 - cosine to the target's)^2, and needs no logits (hpn.h)
    hpn-softmax   cross entropy of scale * cosines
    head_parse, head_to_json   the head in config.json
    head_activations           one line for each buffer
    head_init, head_free       prototypes as the head uses them; head_update_prototypes when they have changed
    head_forward, head_logits, head_losses, head_backward   in this order; hpn asks for logits only to be judged
    head_separate              a loss of learnt prototypes alone, which would otherwise all become one
    head_scores_*              how often the answer is right, and how sure: sums over a validation
Cost:   ce and hpn-softmax: products of N * classes * C; hpn: N * Dp, whatever the number of classes.
Order:  that of the ops. Errors: head_parse leaves one line. CPU only so far: its loops and copies are the host's.
Source: Mettes, van der Pol & Snoek 2019, arXiv:1901.10514; doc/hpn.md
*/
#ifndef LLMC_HEAD_H
#define LLMC_HEAD_H
#include "../core/choice.h"       // choice_name
#include "../core/jsonfile.h"     // json_ints, json_choice
#include "../core/tensor.h"       // Tensor, activation
#include "../ops/crossentropy.h"  // crossentropy_forward, crossentropy_backward
#include "../ops/hpn.h"           // unit_forward, hpn_forward, hpn_readout
#include "../ops/matmul.h"        // matmul_forward, matmul_backward
#include "../ranks/model.h"       // Purpose
#include "prototypes.h"           // prototypes_separation

// ---- 1. Which head ----

#define HEAD_NAMES "ce|hpn|hpn-softmax"
typedef enum { HEAD_CE, HEAD_HPN, HEAD_HPN_SOFTMAX } HeadKind;
#define PROTO_NAMES "fixed|learn"
typedef enum { PROTO_FIXED, PROTO_LEARN } Proto;

typedef struct {
    HeadKind kind;
    int C;               // width of the features
    int classes;         // what it chooses from: the vocabulary, of a language model
    int is_classifier;   // it has classes of its own instead of the next token
    int tied;            // the matrix of ce is the embedding
    int Dp;              // dimensions of a prototype; another size than C needs a projection
    int learns_prototypes;
    float scale;         // factor of the cosines in hpn-softmax
} HeadConfig;

static inline HeadConfig head_config(int C, int classes) {
    const HeadConfig h = {HEAD_CE, C, classes, 0, 1, C, 0, 16.0f};
    return h;
}

// hpn has no softmax: its loss needs no logits and is no likelihood, probabilities are read out of cosines (hpn.h)
static inline int head_reads_out(HeadKind kind) { return kind == HEAD_HPN; }
static inline int head_has_prototypes(const HeadConfig* h) { return h->kind != HEAD_CE; }
static inline int head_is_tied(const HeadConfig* h) { return h->kind == HEAD_CE && h->tied; }
static inline int head_has_projection(const HeadConfig* h) { return head_has_prototypes(h) && h->Dp != h->C; }
static inline ShortText head_name(HeadKind kind) { return choice_name(HEAD_NAMES, (int)kind); }

// can a head take the parameters of another?
static inline int head_is_same(const HeadConfig* h, const HeadConfig* other) {
    const int same_classes = h->is_classifier == other->is_classifier && h->classes == other->classes;
    return h->kind == other->kind && same_classes && h->tied == other->tied &&
           (!head_has_prototypes(h) || h->Dp == other->Dp);
}

// What only our config.json has. What it leaves out is that of a language model, as h came
static inline int head_parse(HeadConfig* h, const json_t* json, ErrorText* error) {
    int kind = -1, proto = PROTO_FIXED;
    const int vocabulary = h->classes;
    const json_t* scale = json_object_get(json, "hpn_scale");
    const JsonInt sizes[] = {{"num_classes", &h->classes, 1, 1 << 24}, {"proto_dim", &h->Dp, 0, 1 << 20}};
    if (!json_choice(&kind, json, "head", HEAD_NAMES, error)) { return 0; }
    if (kind < 0) { return 1; }
    if (!json_choice(&proto, json, "proto", PROTO_NAMES, error)) { return 0; }
    h->kind = (HeadKind)kind;
    h->learns_prototypes = proto == PROTO_LEARN;
    if (scale) { h->scale = (float)json_number_value(scale); }
    if (!(h->scale > 0.0f && h->scale <= 1e6f)) {
        return error_set(error, "\"hpn_scale\": expected a number above 0, at most 1e6, found %g", (double)h->scale);
    }
    for (int i = 0; i < 2; i++) {
        if (json_object_get(json, sizes[i].key) && !json_ints(json, sizes + i, 1, error)) { return 0; }
    }
    // config.json of our first days names num_classes for language models too
    const json_t* classifies = json_object_get(json, "is_classifier");
    h->is_classifier = classifies ? json_is_true(classifies) : h->classes != vocabulary;
    h->tied = h->tied && !h->is_classifier;
    h->Dp = h->Dp > 0 ? h->Dp : h->C;
    return 1;
}

static inline int head_is_language_model(const HeadConfig* h) { return h->kind == HEAD_CE && !h->is_classifier; }

// adds the keys; those of a language model are none
static inline void head_to_json(json_t* json, const HeadConfig* h) {
    if (head_is_language_model(h)) { return; }
    json_object_update_new(json, json_pack("{s:s, s:i, s:s, s:f}", "head", head_name(h->kind).s, "proto_dim", h->Dp,
                                           "proto", choice_name(PROTO_NAMES, h->learns_prototypes).s,
                                           "hpn_scale", (double)h->scale));
    if (!h->is_classifier) { return; }
    json_object_set_new(json, "num_classes", json_integer(h->classes));
    json_object_set_new(json, "is_classifier", json_true());
}

// ---- 2. Tensors ----

// its parameters, or where their gradients are written. NULL: this head has none; nobody asks
typedef struct {
    float *matrix, *prototypes, *projection;  // (classes, C)  (classes, Dp)  (Dp, C)
} HeadTensors;

typedef struct {
    float *z, *z_norm, *z_unit, *cosines, *logits, *losses, *dz, *dz_unit;
} HeadActivations;

enum { HEAD_LOGIT_ROWS = 256 };  // hpn, whose loss needs no logits, computes them for so many positions at a time

static inline int head_logit_rows(const HeadConfig* h, int N, Purpose purpose) {
    return purpose == TO_GENERATE ? 1 : !head_reads_out(h->kind) || N < HEAD_LOGIT_ROWS ? N : HEAD_LOGIT_ROWS;
}

// at: where a HeadActivations is in the struct that the table points into; rows 0: this head or pass has none
static inline int head_activations(Tensor* table, size_t at, const HeadConfig* h, int N, Purpose purpose) {
    const int N_unit = head_has_prototypes(h) ? N : 0, N_train = purpose == TO_TRAIN ? N_unit : 0;
    const int N_projected = head_has_projection(h) ? N : 0;
    Tensor* t = table;
#define FIELD(name) #name, at + offsetof(HeadActivations, name)
    *t++ = activation(FIELD(z),       0, N_projected, h->Dp);
    *t++ = activation(FIELD(z_norm),  0, N_unit, 1);
    *t++ = activation(FIELD(z_unit),  0, N_unit, h->Dp);
    *t++ = activation(FIELD(cosines), 0, N_unit, 1);  // to the target's prototype
    // probabilities, then their gradient
    *t++ = activation(FIELD(logits),  0, head_logit_rows(h, N, purpose), h->classes);
    *t++ = activation(FIELD(losses),  0, N, 1);
    *t++ = activation(FIELD(dz),      0, N_train, h->Dp);
    *t++ = activation(FIELD(dz_unit), 0, N_train, h->Dp);
#undef FIELD
    return (int)(t - table);
}

// ---- 3. The head: from features to losses, and back ----

typedef struct {
    HeadConfig config;
    float *unit, *norms, *dunit;  // prototypes with length 1 (classes, Dp), their lengths, the gradient of `unit`
} Head;

static inline size_t head_prototype_bytes_(const HeadConfig* h) {
    return head_has_prototypes(h) ? sizeof(float) * (size_t)h->classes * (size_t)h->Dp : 0;
}

// what head_init takes; the system gives no page of dunit before a backward pass
static inline double head_bytes(const HeadConfig* h, int backward) {
    const double norms = head_has_prototypes(h) ? sizeof(float) * (double)h->classes : 0.0;
    return (backward && h->learns_prototypes ? 2.0 : 1.0) * ((double)head_prototype_bytes_(h) + norms);
}

static inline void head_init(Head* head, const HeadConfig* h) {
    const size_t n_bytes = head_prototype_bytes_(h);
    head->config = *h;
    head->unit = (float*)arena_alloc(n_bytes, "unit prototypes");
    head->dunit = (float*)arena_alloc(h->learns_prototypes ? n_bytes : 0, "gradient of prototypes");
    head->norms = (float*)arena_alloc(n_bytes / (size_t)h->Dp, "norms of prototypes");
}

static inline void head_free(Head* head) {
    const HeadConfig* h = &head->config;
    const size_t n_bytes = head_prototype_bytes_(h);
    if (!head->unit) { return; }
    arena_free(head->unit, n_bytes);
    arena_free(head->dunit, h->learns_prototypes ? n_bytes : 0);
    arena_free(head->norms, n_bytes / (size_t)h->Dp);
}

// one pass through the head: everything it reads but the targets
typedef struct {
    const Head* head;
    HeadActivations a;
    HeadTensors p;
    const float* features;  // (N, C)
} HeadPass;

static inline void head_update_prototypes(Head* head, const float* prototypes, const Device* dev) {
    const HeadConfig* h = &head->config;
    if (head_has_prototypes(h)) { unit_forward(head->unit, head->norms, prototypes, h->classes, h->Dp, dev); }
}

// the unit vectors of a head with prototypes
static inline void head_forward(const HeadPass* pass, int N, const Device* dev) {
    const HeadConfig* h = &pass->head->config;
    const HeadActivations a = pass->a;
    const float *projection = pass->p.projection, *features = pass->features;
    if (!head_has_prototypes(h)) { return; }
    if (projection) { matmul_forward(a.z, features, projection, NULL, N, h->C, h->Dp, dev); }
    unit_forward(a.z_unit, a.z_norm, projection ? a.z : features, N, h->Dp, dev);
}

// logits of the n positions that follow `first`, into the first n rows: scores or, of hpn, cosines
static inline float* head_logits(const HeadPass* pass, int first, int n, const Device* dev) {
    const HeadConfig* h = &pass->head->config;
    const HeadActivations a = pass->a;
    const size_t from = (size_t)first;
    if (h->kind == HEAD_CE) {
        matmul_forward(a.logits, pass->features + from * h->C, pass->p.matrix, NULL, n, h->C, h->classes, dev);
        return a.logits;
    }
    matmul_forward(a.logits, a.z_unit + from * h->Dp, pass->head->unit, NULL, n, h->Dp, h->classes, dev);
    if (h->kind == HEAD_HPN_SOFTMAX) { hpn_scale_array(a.logits, h->scale, (size_t)n * h->classes, dev); }
    return a.logits;
}

// the losses of all positions. ce and hpn-softmax need all logits before: they become probabilities
static inline const float* head_losses(const HeadPass* pass, const int* targets, int N, const Device* dev) {
    const HeadConfig* h = &pass->head->config;
    const HeadActivations a = pass->a;
    if (head_reads_out(h->kind)) {
        hpn_forward(a.losses, a.cosines, a.z_unit, pass->head->unit, targets, N, h->Dp, dev);
    } else {
        crossentropy_forward(a.losses, a.logits, a.logits, targets, N, h->classes, h->classes, dev);
    }
    return a.losses;
}

// The gradient of the features, and of what d points to. Gradients of prototypes are those of the vectors as stored
static inline void head_backward(const HeadPass* pass, float* dfeatures, HeadTensors d, const int* targets, float dloss,
                                 int N, const Device* dev) {
    const Head* head = pass->head;
    const HeadConfig* h = &head->config;
    const HeadActivations a = pass->a;
    const HeadTensors p = pass->p;
    const float* features = pass->features;
    const int C = h->C, Dp = h->Dp, classes = h->classes;
    if (h->kind == HEAD_CE) {
        crossentropy_backward(a.logits, a.logits, targets, dloss, N, classes, classes, dev);
        matmul_backward(dfeatures, d.matrix, NULL, a.logits, features, p.matrix, N, C, classes, dev);
        return;
    }
    // fixed prototypes have none; with --probe, which asks for all, it is the 0 with which the arena began
    float* dunit = h->learns_prototypes && d.prototypes ? head->dunit : NULL;
    if (dunit) { memset(dunit, 0, sizeof(float) * (size_t)classes * (size_t)Dp); }
    if (h->kind == HEAD_HPN_SOFTMAX) {
        crossentropy_backward(a.logits, a.logits, targets, dloss, N, classes, classes, dev);
        hpn_scale_array(a.logits, h->scale, (size_t)N * classes, dev);
        matmul_backward_input(a.dz_unit, a.logits, head->unit, 0, N, Dp, classes, dev);
        if (dunit) { matmul_backward_weight(dunit, a.logits, a.z_unit, 0, N, Dp, classes, dev); }
    } else {
        hpn_backward(a.dz_unit, dunit, a.z_unit, head->unit, a.cosines, targets, dloss, N, Dp, classes, dev);
    }
    if (dunit) { unit_backward(d.prototypes, dunit, head->unit, head->norms, classes, Dp, dev); }
    unit_backward(p.projection ? a.dz : dfeatures, a.dz_unit, a.z_unit, a.z_norm, N, Dp, dev);
    if (p.projection) { matmul_backward(dfeatures, d.projection, NULL, a.dz, features, p.projection, N, C, Dp, dev); }
}

// Learnt prototypes of hpn: adds to their gradient (classes, Dp), returns the loss, beta times the mean cosine of a
// prototype and its nearest
static inline float head_separate(Head* head, float* dprototypes, float beta, const Device* dev) {
    const HeadConfig* h = &head->config;
    const size_t n = (size_t)h->classes * (size_t)h->Dp;
    memset(head->dunit, 0, sizeof(float) * n);
    const double loss = prototypes_separation(head->dunit, head->unit, beta, h->classes, h->Dp, dev);
    unit_backward(head->dunit, head->dunit, head->unit, head->norms, h->classes, h->Dp, dev);
    residual_forward(dprototypes, dprototypes, head->dunit, n, dev);
    return (float)loss;
}

// ---- 4. Scores: how good the answers are ----

// sums over positions; the last two over batches
enum { SCORE_COUNTED, SCORE_TOP1, SCORE_TOP5, SCORE_COSINE, SCORE_LOG_LOSS, SCORE_PAIRS, SCORE_BATCHES, N_SCORES };

typedef struct {
    double sums[N_SCORES];  // of one batch
    int* ranks;             // (N) of each target among all classes
    float* readout;         // (N)
} HeadScores;

static inline void head_scores_init(HeadScores* s, int N) {
    s->ranks = (int*)malloc_check(sizeof(int) * (size_t)N, "ranks of targets");
    s->readout = (float*)malloc_check(sizeof(float) * (size_t)N, "read-out");
}

static inline void head_scores_free(HeadScores* s) {
    free(s->ranks);
    free(s->readout);
}

// n positions from `first` on, whose logits are in the first rows; -log of the probability that a head without a
// softmax reads out
static inline void head_scores_add_(HeadScores* s, const Head* head, float* logits, const int* targets, int n,
                                    const Device* dev) {
    const HeadConfig* h = &head->config;
    const int classes = h->classes;
    for (int i = 0; i < n; i++) { s->sums[SCORE_COUNTED] += targets[i] >= 0; }
    hpn_target_ranks(s->ranks, logits, targets, n, classes, dev);
    s->sums[SCORE_TOP1] += (double)hpn_count_hits(s->ranks, n, 1);
    s->sums[SCORE_TOP5] += (double)hpn_count_hits(s->ranks, n, 5);
    if (!head_has_prototypes(h)) { return; }
    for (int i = 0; i < n; i++) {
        const float cosine = targets[i] < 0 ? 0.0f : logits[(size_t)i * classes + targets[i]];
        s->sums[SCORE_COSINE] += (double)(h->kind == HEAD_HPN_SOFTMAX ? cosine / h->scale : cosine);
    }
    if (h->kind == HEAD_HPN_SOFTMAX) { return; }
    hpn_readout(logits, logits, n, classes, dev);
    crossentropy_forward(s->readout, logits, logits, targets, n, classes, classes, dev);
    for (int i = 0; i < n; i++) { s->sums[SCORE_LOG_LOSS] += (double)s->readout[i]; }
}

// a batch begins: its losses, and the scores for which its logits must be seen before they become probabilities
static inline const float* head_scores_losses(HeadScores* s, const HeadPass* pass, const int* targets, int N,
                                              const Device* dev) {
    memset(s->sums, 0, sizeof s->sums);
    s->sums[SCORE_BATCHES] = 1.0;
    if (!head_reads_out(pass->head->config.kind)) {
        head_scores_add_(s, pass->head, head_logits(pass, 0, N, dev), targets, N, dev);
    }
    return head_losses(pass, targets, N, dev);
}

// rows (N, D) of counted targets move to the front, at most so many; returns their number
static inline int head_gather_counted_(float* rows, const int* targets, int N, int D, int most) {
    int n = 0;
    for (int i = 0; i < N && n < most; i++) {
        if (targets[i] >= 0) { memmove(rows + (size_t)n++ * D, rows + (size_t)i * D, sizeof(float) * (size_t)D); }
    }
    return n;
}

// the same batch: scores that need the cosines to all prototypes, some positions at a time. z_unit is used up
static inline void head_scores_rest(HeadScores* s, const HeadPass* pass, const int* targets, int N,
                                    const Device* dev) {
    const HeadConfig* h = &pass->head->config;
    const int rows = head_logit_rows(h, N, TO_EVALUATE);
    for (int first = 0; first < N && head_reads_out(h->kind); first += rows) {
        const int n = N - first < rows ? N - first : rows;
        head_scores_add_(s, pass->head, head_logits(pass, first, n, dev), targets + first, n, dev);
    }
    if (!head_has_prototypes(h)) { return; }
    const int n = head_gather_counted_(pass->a.z_unit, targets, N, h->Dp, HPN_PAIRS_SAMPLE);
    s->sums[SCORE_PAIRS] = hpn_mean_pairwise_cosine(pass->a.z_unit, n, h->Dp);
}
#endif  // LLMC_HEAD_H
