/*
The next token from a row of logits: repetition penalty, temperature, top-k, top-p, min-p, one after the other, then one
draw.
    logits (V)   coin in [0, 1)   seen (V): not 0 for the tokens of the text so far; NULL: none   scratch: V candidates
    repetition_penalty   the logit of a token that was seen: a positive one is divided by it, a negative one multiplied;
                         1: off
    temperature          logits are divided by it; 0: the largest, lowest index among equals, and nothing is drawn
    top_k                only the k largest, lower indices first among equals; 0: off
    top_p                of these the shortest list, from the likeliest down, that holds this probability; 1: off
    min_p                of these the ones at least min_p times as likely as the likeliest; 0: off
    sample_candidates    what is left, with weights proportional to their probabilities;  sample_token draws one of it
Order:  exp((logit - max) / temperature) chains over the candidates; without top-k and top-p they are walked by index,
        as upstream does; otherwise from the likeliest down, equal ones by index. The first whose cumulative sum passes
        coin * total is taken.
Cost:   one exp per candidate and, for top-k or top-p, a sort of V: about 5 ms at V = 50257.
Source: Keskar et al. 2019, arXiv:1909.05858 (repetition penalty); Holtzman et al. 2019, arXiv:1904.09751 (top-p);
        Nguyen et al. 2024, arXiv:2407.01082 (min-p). The order of the filters, and what each keeps, is that of Hugging
        Face transformers, but that it keeps all equals of the k-th largest logit.  Explained in doc/sampling.md
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "../core/fmath.h"  // fm_exp
#include <stdlib.h>

typedef struct {
    float weight;  // first the logit, then exp((logit - max) / temperature)
    int token;
} Candidate;

static inline int sample_order_(const void* a, const void* b) {
    const Candidate *x = (const Candidate*)a, *y = (const Candidate*)b;
    return x->weight > y->weight ? -1 : x->weight < y->weight ? 1 : x->token - y->token;
}

typedef struct {
    float repetition_penalty, temperature, top_p, min_p;
    int top_k;
} Sampling;

static inline float sample_penalized_(float logit, float penalty) {
    return logit < 0.0f ? logit * penalty : logit / penalty;
}

// the shortest list that holds top_p of the probability
static inline int sample_keep_top_p_(const Candidate* scratch, int n, float top_p) {
    float total = 0.0f, sum = 0.0f;
    int kept = 0;
    for (int i = 0; i < n; i++) { total += scratch[i].weight; }
    for (; kept < n && (kept == 0 || sum < top_p * total); kept++) { sum += scratch[kept].weight; }
    return kept;
}

// the likeliest has weight 1; the rest keep their order
static inline int sample_keep_min_p_(Candidate* scratch, int n, float min_p) {
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (!(scratch[i].weight < min_p)) { scratch[kept++] = scratch[i]; }  // a NaN stays: something must
    }
    return kept;
}

// the tokens from which one is drawn, 1 at least, into scratch; returns how many
static inline int sample_candidates(const float* logits, int V, const Sampling* s, const unsigned char* seen,
                                    Candidate* scratch) {
    int best = 0, n = V;
    for (int v = 0; v < V; v++) {
        scratch[v].weight = seen && seen[v] ? sample_penalized_(logits[v], s->repetition_penalty) : logits[v];
        scratch[v].token = v;
        best = scratch[v].weight > scratch[best].weight ? v : best;
    }
    const float max = scratch[best].weight;
    if (s->temperature == 0.0f) {
        scratch[0].weight = 1.0f;
        scratch[0].token = best;
        return 1;
    }
    if (s->top_k > 0 || s->top_p < 1.0f) { qsort(scratch, (size_t)V, sizeof *scratch, sample_order_); }
    if (s->top_k > 0 && s->top_k < n) { n = s->top_k; }
    for (int i = 0; i < n; i++) { scratch[i].weight = fm_exp((scratch[i].weight - max) / s->temperature); }
    if (s->top_p < 1.0f) { n = sample_keep_top_p_(scratch, n, s->top_p); }
    return s->min_p > 0.0f ? sample_keep_min_p_(scratch, n, s->min_p) : n;
}

static inline int sample_token(const float* logits, int V, const Sampling* s, const unsigned char* seen, float coin,
                               Candidate* scratch) {
    const int n = sample_candidates(logits, V, s, seen, scratch);
    float total = 0.0f, sum = 0.0f;
    for (int i = 0; i < n; i++) { total += scratch[i].weight; }
    for (int i = 0; i < n; i++) {
        sum += scratch[i].weight;
        if (coin * total < sum) { return scratch[i].token; }
    }
    return scratch[n - 1].token;
}
#endif  // LLMC_SAMPLER_H
