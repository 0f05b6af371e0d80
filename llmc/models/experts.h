/*
Products of experts that this rank has, for the tokens of one rank or of several (ranks/expert_parallel.h): the calls of
ops/grouped_matmul.h, one source after the other. A weight's gradient is computed leaf by leaf and joins the tree of
ranks/leaf_tree.h: the bits are those of one rank that has computed these leaves.
    experts_forward, experts_backward_input   every row by itself
    experts_backward_weight                   the sum over the leaves
    experts_backward_adapters                 the same of the experts' adapters
    experts_scratch_floats                    that both need
    experts_rows_most    rows that the experts of this rank may get, for which activations are laid out
BY_TOKEN: where rows do not travel, the operand lies with its tokens, (N, C), and a row is found there. ROW_BY_ROW: it
lies row after row, (n_rows, C), as what was computed or received does.
*/
#ifndef LLMC_EXPERTS_H
#define LLMC_EXPERTS_H
#include "../core/floatx.h"            // floatX
#include "../ops/grouped_matmul.h"     // grouped_matmul_backward_weight
#include "../ops/residual.h"           // residual_forward
#include "../ranks/expert_parallel.h"  // ExpertParallel, ExpertSource
#include "linear.h"                    // Linear
#include <limits.h>
#include <math.h>

// how the experts of a layer are divided among ranks
typedef struct {
    int size;    // ranks that divide them; 0 or 1: each has all
    float room;  // rows that one of them can compute, as a multiple of its own; 0: whatever may come
    int parts;   // so many of these ranks compute one micro-batch together (--tp); 0 or 1: each its own
} EpOptions;

// of the N positions of a micro-batch those that a rank brings, at most
static inline int experts_positions(const EpOptions* x, int N) {
    return x->parts > 1 ? (N + x->parts - 1) / x->parts : N;
}

// N positions here and as many in each micro-batch of ranks that share the experts; a token takes each of its k experts
// once
static inline int experts_rows_most(const EpOptions* x, int E, int k, int N) {
    const double R = (double)experts_positions(x, N) * k;
    if (x->size <= 1) { return (int)R; }
    const int held = E / x->size, leaves = x->size / (x->parts > 1 ? x->parts : 1);
    const double most = (double)N * leaves * (held < k ? held : k);
    const double rows = x->room > 0.0f ? fmin(most, ceil(R * (double)x->room)) : most;
    return (int)fmin(rows, INT_MAX / 2);
}

typedef enum { ROW_BY_ROW, BY_TOKEN } RowsLie;

// where each row of an operand is found; NULL: in order
static inline const int* experts_index_(const ExpertSource* s, RowsLie lie) {
    return lie == BY_TOKEN ? s->token : NULL;
}

// an operand's first row of this source
static inline const floatX* experts_rows_(const floatX* x, const ExpertSource* s, RowsLie lie, int width) {
    return experts_index_(s, lie) ? x : x + (size_t)s->first * (size_t)width;
}

// out (n_rows, OC); w (n_held, OC, C)
static inline void experts_forward(const ExpertParallel* ep, floatX* out, const floatX* inp, RowsLie lie, Linear w,
                                   const Device* dev) {
    for (int i = 0; i < ep->n_sources; i++) {
        const ExpertSource* s = &ep->source[i];
        const floatX* x = experts_rows_(inp, s, lie, w.C);
        floatX* y = out + (size_t)s->first * (size_t)w.OC;
        if (s->n == 0) { continue; }
        linear_grouped_forward(y, x, experts_index_(s, lie), w, s->offsets, ep->n_held, s->n, dev);
    }
}

// dinp (n_rows, C)
static inline void experts_backward_input(const ExpertParallel* ep, floatX* dinp, const floatX* dout, RowsLie lie,
                                          Linear w, const Device* dev) {
    for (int i = 0; i < ep->n_sources; i++) {
        const ExpertSource* s = &ep->source[i];
        const floatX* dy = experts_rows_(dout, s, lie, w.OC);
        floatX* dx = dinp + (size_t)s->first * (size_t)w.C;
        if (s->n == 0) { continue; }
        linear_grouped_backward_input(dx, dy, experts_index_(s, lie), w, s->offsets, ep->n_held, s->n, dev);
    }
}

// of E experts with `widest` elements each: nodes of the tree that wait for their right half, and one that is computed
static inline size_t experts_scratch_floats(const EpOptions* x, int E, size_t widest) {
    const int ranks = x->size > 1 ? x->size : 1, of_group = ranks / (x->parts > 1 ? x->parts : 1);
    size_t n = 0;
    for (int leaves = 1; leaves < of_group; leaves *= 2) { n += (size_t)(E / ranks) * widest; }
    return n;
}

// ---- gradients: that of leaf i is pushed onto a stack, whose bottom is where the sum is wanted; what stands above is
// in scratch. As often as i + 1 is even the two topmost nodes, of n elements, become one ----

static inline float* experts_top_(float* bottom, float* scratch, size_t n, int top) {
    return top == 0 ? bottom : scratch + n * (size_t)(top - 1);
}

// once leaf i is on top; where the next one goes comes back
static inline int experts_join_(float* bottom, float* scratch, size_t n, int top, int i, const Device* dev) {
    for (int leaves = i + 1; leaves % 2 == 0; leaves /= 2, top--) {
        float* left = experts_top_(bottom, scratch, n, top - 1);
        residual_forward(left, left, experts_top_(bottom, scratch, n, top), n, dev);
    }
    return top + 1;
}

// dweight (n_held, OC, C), written; NULL: it does not learn
static inline void experts_backward_weight(const ExpertParallel* ep, float* dweight, const floatX* dout,
                                           RowsLie dout_lie, const floatX* inp, RowsLie inp_lie, float* scratch, int C,
                                           int OC, const Device* dev) {
    const size_t n = (size_t)ep->n_held * (size_t)OC * (size_t)C;
    if (!dweight) { return; }
    if (ep->parts > 1) { dout_lie = inp_lie = BY_TOKEN; }  // rows that have come are found by number
    for (int i = 0, top = 0; i < ep->n_leaves; i++) {
        const ExpertSource* s = &ep->leaf[i];
        grouped_matmul_backward_weight(experts_top_(dweight, scratch, n, top), experts_rows_(dout, s, dout_lie, OC),
                                       experts_index_(s, dout_lie), experts_rows_(inp, s, inp_lie, C),
                                       experts_index_(s, inp_lie), s->offsets, ep->n_held, s->n, C, OC, dev);
        top = experts_join_(dweight, scratch, n, top, i, dev);
    }
}

// of leaf s, those that d asks for
static inline void experts_leaf_adapters_(const ExpertParallel* ep, const ExpertSource* s, const LinearGradients* d,
                                          const floatX* dout, RowsLie dout_lie, const floatX* inp, RowsLie inp_lie,
                                          const float* weight, Linear w, const Device* dev) {
    const int* numbers = ep->parts > 1 ? s->token : NULL;
    linear_grouped_backward_adapters(d, experts_rows_(dout, s, dout_lie, w.OC), experts_index_(s, dout_lie),
                                     experts_rows_(inp, s, inp_lie, w.C), experts_index_(s, inp_lie),
                                     weight && !numbers ? weight + s->first : weight, numbers, w, s->offsets,
                                     ep->n_held, s->n, dev);
}

// The same of A and B of the experts' adapters; they share nothing, so one comes after the other. weight (n_rows): what
// a row is multiplied by in all that comes after this product, or NULL
static inline void experts_backward_adapters(const ExpertParallel* ep, const LinearGradients* d, const floatX* dout,
                                             RowsLie dout_lie, const floatX* inp, RowsLie inp_lie, const float* weight,
                                             Linear w, float* scratch, const Device* dev) {
    if (ep->parts > 1) { dout_lie = inp_lie = BY_TOKEN; }
    for (int k = 0; k < 2 * w.n_adapters; k++) {
        const int is_B = k % 2;
        const LoraShape* shape = &w.adapter[k / 2].shape;
        const size_t n = (size_t)ep->n_held * (size_t)shape->r * (size_t)(is_B ? shape->n_out : shape->C);
        float* gradient = is_B ? d->B[k / 2] : d->A[k / 2];
        for (int i = 0, top = 0; gradient && i < ep->n_leaves; i++) {
            LinearGradients of = NO_GRADIENTS;
            *(is_B ? &of.B[k / 2] : &of.A[k / 2]) = experts_top_(gradient, scratch, n, top);
            experts_leaf_adapters_(ep, &ep->leaf[i], &of, dout, dout_lie, inp, inp_lie, weight, w, dev);
            top = experts_join_(gradient, scratch, n, top, i, dev);
        }
    }
}
#endif  // LLMC_EXPERTS_H
