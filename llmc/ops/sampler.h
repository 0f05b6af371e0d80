/*
The next token from a row of logits: temperature, then top-k, then top-p, then one draw.
    logits (V)   coin in [0, 1)   scratch: V candidates
    temperature 0: the largest logit, lowest index among equals; top_k 0 and top_p 1: off
Order:  exp((logit - max) / temperature) chains over the candidates; without top-k and top-p they are walked by index,
        as upstream does; otherwise from the likeliest down, equal ones by index. The first whose cumulative sum passes
        coin * total is taken.
Cost:   one exp per candidate and, for top-k or top-p, a sort of V: about 5 ms at V = 50257.
Source: Holtzman et al. 2019, arXiv:1904.09751 (top-p); spec gpt2.md section 17
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

static inline int sample_argmax(const float* logits, int V) {
    int best = 0;
    for (int v = 1; v < V; v++) { best = logits[v] > logits[best] ? v : best; }
    return best;
}

static inline int sample_token(const float* logits, int V, float temperature, int top_k, float top_p, float coin,
                               Candidate* scratch) {
    int best = sample_argmax(logits, V), n = V;
    if (temperature == 0.0f) { return best; }
    for (int v = 0; v < V; v++) {
        scratch[v].weight = logits[v];
        scratch[v].token = v;
    }
    if (top_k > 0 || top_p < 1.0f) { qsort(scratch, (size_t)V, sizeof *scratch, sample_order_); }
    if (top_k > 0 && top_k < n) { n = top_k; }
    float total = 0.0f, sum = 0.0f;
    for (int i = 0; i < n; i++) {
        scratch[i].weight = fm_exp((scratch[i].weight - logits[best]) / temperature);
        total += scratch[i].weight;
    }
    if (top_p < 1.0f) {  // the shortest list that holds top_p of the probability
        int kept = 0;
        for (; kept < n && (kept == 0 || sum < top_p * total); kept++) { sum += scratch[kept].weight; }
        n = kept;
        total = sum;
    }
    sum = 0.0f;
    for (int i = 0; i < n; i++) {
        sum += scratch[i].weight;
        if (coin * total < sum) { return scratch[i].token; }
    }
    return scratch[n - 1].token;
}
#endif  // LLMC_SAMPLER_H
