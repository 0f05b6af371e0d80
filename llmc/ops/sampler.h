/*
The next token from a row of logits: repetition penalty, temperature, top-k, top-p, min-p, one after the other, then one
draw.
    logits (V)   coin in [0, 1)   seen (V): not 0 for the tokens of the text so far; NULL: none
    scratch: 2*V candidates
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
Cost:   one exp per candidate and, for top-k or top-p, a sort of V by digits, four passes. At V = 32000 on one core of
        an AMD EPYC: greedy 0.03 ms, temperature alone 0.20, with top-k 0.30, with top-p 0.48.
Source: Keskar et al. 2019, arXiv:1909.05858 (repetition penalty); Holtzman et al. 2019, arXiv:1904.09751 (top-p);
        Nguyen et al. 2024, arXiv:2407.01082 (min-p). The order of the filters, and what each keeps, is that of Hugging
        Face transformers, but that it keeps all equals of the k-th largest logit.  Explained in doc/sampling.md
*/
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H
#include "../core/fmath.h"  // fm_exp
#include <string.h>

typedef struct {
    float weight;  // first the logit, then exp((logit - max) / temperature)
    int token;
} Candidate;

// smaller for larger weights, the same for 0 and -0
static inline uint32_t sample_order_(float weight) {
    uint32_t bits;
    weight += 0.0f;  // -0 + 0 is 0
    memcpy(&bits, &weight, sizeof bits);
    return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// from the largest weight down, equal ones in the order in which they are: by digits of 8 bits, the lowest first. other
// (n): scratch, where every other pass leaves its result
static inline void sample_sort_(Candidate* list, Candidate* other, int n) {
    for (int shift = 0; shift < 32; shift += 8) {
        int place[257] = {0};
        for (int i = 0; i < n; i++) { place[(sample_order_(list[i].weight) >> shift & 255) + 1]++; }
        for (int digit = 1; digit < 256; digit++) { place[digit] += place[digit - 1]; }
        for (int i = 0; i < n; i++) { other[place[sample_order_(list[i].weight) >> shift & 255]++] = list[i]; }
        Candidate* sorted = other;
        other = list, list = sorted;
    }
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
    float max = 0.0f;
    for (int v = 0; v < V; v++) {
        const float weight = seen && seen[v] ? sample_penalized_(logits[v], s->repetition_penalty) : logits[v];
        scratch[v].weight = weight;
        scratch[v].token = v;
        if (v == 0 || weight > max) { max = weight, best = v; }
    }
    if (s->temperature == 0.0f) {
        scratch[0].weight = 1.0f;
        scratch[0].token = best;
        return 1;
    }
    if (s->top_k > 0 || s->top_p < 1.0f) { sample_sort_(scratch, scratch + V, V); }
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
